// Runs before the first paint: sets the theme, so that a dark page never flashes white.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let wanted = "auto";
  try {
    wanted = localStorage.getItem("theme") || "auto";
  } catch {
    // storage is switched off in this browser: the system's theme it is
  }
  const apply = () => {
    const theme = wanted === "auto" ? (dark.matches ? "dark" : "light") : wanted;
    document.documentElement.dataset.theme = theme;
    document.documentElement.dataset.wanted = wanted;
  };
  dark.addEventListener("change", apply);
  addEventListener("mlx_zip:theme", (event) => {
    wanted = event.detail;
    apply();
  });
  apply();
})();

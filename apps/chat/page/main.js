// Starts the page.

import { key, takeKey } from "./api.js";
import { emit, on } from "./bus.js";
import { messageOf, startChat } from "./chat.js";
import { startComposer } from "./composer.js";
import { lockedOut, startConnection } from "./connection.js";
import { startDropped } from "./dropped.js";
import { startKeys } from "./keys.js";
import { startLive } from "./live.js";
import { app, fetchConversation, refreshState, show } from "./model.js";
import { startOffer } from "./offer.js";
import { startPanel } from "./panel.js";
import { startPopover } from "./popover.js";
import { startRace } from "./race.js";
import { refreshList, startSidebar } from "./sidebar.js";
import { guarded, startBanner } from "./tell.js";
import { startToolbar } from "./toolbar.js";
import { address, startWays } from "./ways.js";

const channel = new BroadcastChannel("mlx_zip");

function start() {
  takeKey();
  if (localStorage.getItem("sidebar") === "off") document.documentElement.classList.add("no-sidebar");
  startSidebar();
  startToolbar();
  startChat();
  startComposer();
  startOffer();
  startDropped();
  startLive();
  startPanel();
  startPopover(messageOf);
  startRace();
  startKeys();
  startConnection();
  startBanner();
  startTabs();
  on("created withdrawn", (conversation) => conversation === app.conversation && address(conversation.id));
  if (key()) guarded(begin);
  else {
    show(null);
    lockedOut();
  }
}

async function begin() {
  const known = refreshState();
  const listed = refreshList();
  show(null);
  await known;
  await Promise.all([listed, startWays()]);
  document.documentElement.dataset.ready = "true";
}

/** Keeps two tabs in step: each tells the other what it changed, and looks again when it comes to the front. */
function startTabs() {
  on("saved created", (detail) => channel.postMessage({ id: detail?.id ?? detail }));
  on("withdrawn", () => channel.postMessage({ id: null }));
  on("answered", (conversation) => channel.postMessage({ id: conversation.id }));
  channel.addEventListener("message", ({ data }) => key() && guarded(() => look(data.id)));
  addEventListener("focus", () => key() && app.state && guarded(() => look(app.conversation.id)));
}

async function look(id) {
  await refreshList();
  const { conversation } = app;
  if (conversation.id === null || conversation.id !== id || conversation.running) return;
  const before = [conversation.updated, conversation.leaf, conversation.messages.size].join();
  const draft = conversation.draft;
  try {
    await fetchConversation(id);
  } catch (error) {
    if (error.status !== 404) throw error;
    show(null); // deleted in another tab
    address(null);
    return;
  }
  conversation.draft = draft;
  if ([conversation.updated, conversation.leaf, conversation.messages.size].join() !== before) emit("path", conversation);
  emit("changed", { conversation, fields: {} });
}

start();

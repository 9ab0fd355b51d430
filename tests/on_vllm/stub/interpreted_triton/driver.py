from triton.backends.driver import DriverBase


class NoDriver(DriverBase):
    """Is active, which is all that vLLM asks."""

    @classmethod
    def is_active(cls):
        return True

    def _refuse(self, *_args, **_kwargs):
        raise NotImplementedError("kernels are interpreted here (TRITON_INTERPRET=1)")

    map_python_to_cpp_type = get_current_target = get_active_torch_device = get_benchmarker = _refuse

"""Private parts of JAX, read in JAX 0.10 to 0.12. Each use is held by tests/compat/test_jax.py."""

import ctypes

from jax._src import distributed


def forget_the_others() -> None:
    """Let this process end by itself: of `jax.distributed`, which has all processes take leave together.

    It waits five minutes for them at the end of the program, and no argument or public function changes that.
    """
    state = distributed.global_state
    for connected in (state.preemption_sync_manager, state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connected))  # the destructors would take leave, too
    state.preemption_sync_manager = state.client = state.service = None

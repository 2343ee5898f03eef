"""`python -m sglang.launch_server` whose processes are forks of the first one, which has imported everything.

It starts in half the time. As users start it, each process imports everything again: that is what the tests of start-up, of the
front ends and of fresh environments do.
"""

import importlib
import multiprocessing
import sys

COMMAND = (sys.executable, __file__)
"""What the arguments of a server follow."""
OF_THE_OTHER_PROCESSES = ("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager")
_set_start_method = multiprocessing.set_start_method


def main() -> None:
    for name in OF_THE_OTHER_PROCESSES:
        importlib.import_module(name)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    multiprocessing.set_start_method = lambda method, force=False: _set_start_method("fork", force=True)
    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()

"""A child for tests of `host.worker`: does as its settings say."""

import os
import signal
import sys
import time

from gpuagent.host.child import begin


def main() -> None:
    slot, pipes, settings = begin(sys.argv)
    do = settings["do"]
    if do == "echo":
        while True:
            slot.alive()
            try:
                for line in pipes.receive(0.1):
                    pipes.send({"heard": line.decode()})
            except EOFError:
                return
    elif do == "hang":
        slot.alive()
        pipes.send({"heard": "about to hang"})
        slot.enter(7, b"a_call")
        while True:
            time.sleep(60)
    elif do == "stand still":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif do == "junk":
        os.set_blocking(pipes._sink, True)
        with open(pipes._sink, "wb") as sink:
            sink.write(bytes.fromhex(str(settings["hex"])) * int(str(settings["times"])))
            sink.flush()
            time.sleep(60)
    elif do == "print":
        print("a library that prints", flush=True)
        pipes.send({"heard": "said"})
        pipes.finish(5)
        sys.exit("and then it failed")
    elif do == "flood":
        end = time.monotonic() + float(str(settings["seconds"]))
        sent = 0
        while time.monotonic() < end:
            pipes.send({"heard": "x" * 1000}, droppable=True)
            sent += 1
        with open(str(settings["report"]), "w", encoding="ascii") as file:
            with open("/proc/self/status", encoding="ascii") as status:
                rss = next(line for line in status if line.startswith("VmRSS"))
            file.write(f"{sent} {pipes.dropped} {rss.split()[1]}")
        pipes.finish(5)
    elif do == "ignore":
        pipes.send({"heard": "ignoring"})
        while True:
            time.sleep(60)


main()

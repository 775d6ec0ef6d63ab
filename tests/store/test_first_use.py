"""The first look at a run may be that of several threads at once."""

import subprocess
import sys

PROGRAM = """
import os, sys, threading
import msgspec
from everstep.atoms import Layout
from everstep.format import documents
from everstep.frame import Footer, Gradient, TensorRef, Update
from everstep.store import segments

footer = msgspec.msgpack.encode(Footer(1, (Update("o", (Gradient(1, TensorRef(1, (2,), 0, 1)),)),), b"", 0, 0))
layout = documents.encode(Layout((), (), ()))
sys.setswitchinterval(1e-6)


def look():
    for _ in range(3):
        segments._decode(footer, Footer, "here")
        documents.decode(layout, Layout, "here")


for _ in range(30):
    if not os.fork():  # nothing has been decoded yet
        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_threads_that_decode_for_the_first_time_at_once_do_not_crash():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["0"] * 30

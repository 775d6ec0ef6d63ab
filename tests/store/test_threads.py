"""What several threads read at once for the first time."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import msgspec
from everstep.atoms import Layout
from everstep.format import documents
from everstep.frame import Footer
from everstep.store import segments

sys.setswitchinterval(1e-6)
footer = msgspec.msgpack.encode(Footer(1, (), b"", 0, 0))
layout = documents.encode(Layout((), (), ()))
ready = threading.Barrier(8)

def work():
    ready.wait()
    segments._decode(footer, Footer, "")
    documents.decode(layout, Layout, "")

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.long
def test_threads_that_meet_a_kind_of_document_at_the_same_moment_do_not_crash() -> None:
    for _ in range(8):  # without what prevents it, three of eight processes crashed
        subprocess.run([sys.executable, "-c", PROGRAM], check=True)

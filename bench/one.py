"""Run one measurement in a process of its own: python -m bench.one MODULE ID [--quick]"""

from __future__ import annotations

import sys
import time

from bench.child import emit
from bench.measure import Failed, measured


def main() -> None:
    began = time.monotonic()
    try:
        values = measured(sys.argv[1], sys.argv[2], "--quick" in sys.argv)
    except Failed as error:
        emit({"error": str(error), "seconds": time.monotonic() - began})
        return
    found = {name: {"error": str(one)} if isinstance(one, Exception) else one for name, one in values.items()}
    emit({"values": found, "seconds": time.monotonic() - began})


if __name__ == "__main__":
    main()

"""`ray start --resources="$(python -m memguard.integrations.ray)"`: this machine's GPU memory, in Ray's words."""

from __future__ import annotations

import json
import sys

from memguard.errors import MemguardError
from memguard.integrations.ray import node_resources

if __name__ == "__main__":
    try:
        print(json.dumps(node_resources()))
    except MemguardError as error:
        sys.exit(f"memguard: {error}")

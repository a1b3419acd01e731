"""`ray start --resources="$(python -m memguard.integrations.ray)"`: print the machine's GPU memory for Ray."""

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

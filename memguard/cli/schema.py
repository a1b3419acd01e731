"""`memguard schema`: the budget file's JSON Schema."""

from __future__ import annotations

import click


@click.command("schema")
def schema() -> None:
    """Print the JSON Schema (2020-12) of the budget file, for editors."""
    import json

    from memguard._budget import json_schema

    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))

"""JSON Schema 2020-12 of the budget file, for editors: completion, descriptions, errors while typing.

It says what each value may look like. What must hold between values (sums of shares and sizes) only memguard checks.
"""

from __future__ import annotations

from typing import Any

from memguard._config.values import FORECAST, INTERVAL, MAX_NCCL, MAX_PATH, TIMELINE_SIZE
from memguard._findings import NAMES
from memguard._specs import SPECS
from memguard._units import GRANULE, MAX_SIZE

_UNIT = "([Bb]|[KkMmGgTt][Ii][Bb])"
_SIZE_TEXT = rf"^\s*([0-9]{{1,40}}(\.[0-9]{{1,20}})?\s*{_UNIT}|[1-9][0-9]{{6,15}})\s*$"
_PERCENT_TEXT = r"^\s*0*(?!0*(\.0*)?\s*%)(100(\.0{1,20})?|[0-9]{1,2}(\.[0-9]{1,20})?)\s*%\s*$"
_DURATION_TEXT = r"^\s*[0-9]{1,9}(\.[0-9]{1,20})?\s*([Mm][Ss]|[Ss]|[Mm][Ii][Nn]|[Hh])?\s*$"
_UUID = "[Gg][Pp][Uu]-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"

_SIZE = {
    "description": "A size: 512MiB, 1.5GiB (base 1024: B, KiB, MiB, GiB, TiB) or plain bytes; at least 2MiB.",
    "anyOf": [
        {"type": "string", "pattern": _SIZE_TEXT},
        {"type": "integer", "minimum": GRANULE, "maximum": MAX_SIZE},
    ],
    "examples": ["512MiB", "1.5GiB"],
}
_PERCENT = {
    "description": "A percentage above 0% and at most 100%.",
    "type": "string",
    "pattern": _PERCENT_TEXT,
    "examples": ["50%", "12.5%"],
}
_DEVICE = {
    "limit": {
        "description": "What this process may take of each GPU: a percentage of what CUDA can give, or bytes.",
        "anyOf": [{"$ref": "#/$defs/percent"}, {"$ref": "#/$defs/size"}],
    },
    "reserve": {
        "description": "The part of the limit kept for the CUDA context and library workspaces, which lie outside "
        "every framework's own cap: auto (by GPU architecture and declared frameworks), or bytes.",
        "anyOf": [{"const": "auto"}, {"$ref": "#/$defs/size"}],
    },
}


def _framework(name: str, **more: object) -> dict[str, object]:
    return {
        "description": f"What {name} may take of each GPU: exactly one of share and limit.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "share": {"description": "A percentage of (limit − reserve).", "$ref": "#/$defs/percent"},
            "limit": {"description": "Bytes, the same on every GPU.", "$ref": "#/$defs/size"},
            **more,
        },
        "oneOf": [{"required": ["share"]}, {"required": ["limit"]}],
    }


_GROWTH = {
    "description": "true: TensorFlow's pool grows up to its cap as it needs memory. false: it takes its whole cap at "
    "its first operation.",
    "type": "boolean",
    "default": True,
}
_NCCL = {
    "description": "How many NCCL communicators torch.distributed keeps at once on each GPU: one for each process "
    "group that communicates. They lie outside torch's cap; reserve: auto keeps room for them.",
    "type": "integer",
    "minimum": 0,
    "maximum": MAX_NCCL,
    "default": 0,
}
_CONTEXT = {
    "description": "primary: Device.make_context() and pycuda.autoinit give the CUDA context that the other frameworks "
    "share. own: they make a second one, which takes about 518 MiB more; reserve: auto keeps room for one.",
    "enum": ["primary", "own"],
    "default": "primary",
}
_OWN: dict[str, dict[str, object]] = {
    "torch": {"nccl": _NCCL},
    "tensorflow": {"growth": _GROWTH},
    "pycuda": {"context": _CONTEXT},
}


def _duration(what: str, least: float, most: float, default: str, *more: object) -> dict[str, object]:
    return {
        "description": what,
        "anyOf": [
            {"type": "string", "pattern": _DURATION_TEXT},
            {"type": "number", "minimum": least, "maximum": most},
            *more,
        ],
        "default": default,
    }


_MONITOR = {
    "interval": _duration(
        "How often the GPUs are looked at: 500ms, 2s, or plain seconds; from 50ms to 1h. It slows down by itself "
        "rather than take more than 1% of a core.",
        *INTERVAL,
        "500ms",
    ),
    "warn": {
        "description": "The part of a framework's cap, or of the limit of a GPU, from which on a warning is given.",
        "$ref": "#/$defs/percent",
        "default": "85%",
    },
    "critical": {
        "description": "The part from which on the pressure is critical; above warn.",
        "$ref": "#/$defs/percent",
        "default": "95%",
    },
    "forecast": _duration(
        "How long before a cap or limit is reached, by a steady rise, a warning is given: 20s; from 1s to 1h, or 0 for "
        "none.",
        *FORECAST,
        "20s",
        {"const": 0},
    ),
    "timeline": {
        "description": "A file that everything seen is written to, relative to the folder of this file. {pid} and "
        "{rank} are filled in.",
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_PATH,
        "pattern": r"^(?!~)(?!\s*$)([^$\x00-\x1f{}]|\{(pid|rank)\})*$",
        "not": {"pattern": r"(^|/)\.{0,2}$"},
        "examples": ["memguard.jsonl", "runs/{rank}.jsonl"],
    },
    "timeline_size": {
        "description": "The most that the timeline may take on disk; at least 1MiB.",
        "anyOf": [
            {"type": "string", "pattern": _SIZE_TEXT},
            {"type": "integer", "minimum": TIMELINE_SIZE, "maximum": MAX_SIZE},
        ],
        "default": "64MiB",
    },
}

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "memguard budget",
    "description": "How much memory of each GPU one process may take, and which framework gets which part of it.",
    "type": "object",
    "additionalProperties": False,
    "required": ["version", "frameworks"],
    "properties": {
        "version": {"description": "The version of this format.", "const": 1},
        "device": {
            "description": "What this process may take of each GPU.",
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "limit": {**_DEVICE["limit"], "default": "90%"},
                "reserve": {**_DEVICE["reserve"], "default": "auto"},
            },
        },
        "devices": {
            "description": "Other values for single GPUs: by UUID, by CUDA ordinal (0 or cuda:0), or by a "
            "pattern of the name (*, ? and [...], upper and lower case alike).",
            "type": "object",
            "propertyNames": {
                "anyOf": [
                    {"pattern": rf"^\s*({_UUID}|([Cc][Uu][Dd][Aa]:)?(0|[1-9][0-9]{{0,3}}))\s*$"},
                    {
                        "pattern": r"[^-+.0-9_\s]",
                        "not": {"pattern": r"^\s*([Gg][Pp][Uu]-|[Mm][Ii][Gg]-|[Cc][Uu][Dd][Aa]:)"},
                    },
                ]
            },
            "additionalProperties": {"type": "object", "additionalProperties": False, "properties": _DEVICE},
        },
        "frameworks": {
            "description": "The frameworks this process may use the GPU with. One that is not named gets no cap.",
            "type": "object",
            "additionalProperties": False,
            "minProperties": 1,
            "properties": {name: _framework(name, **_OWN.get(name, {})) for name in SPECS},
        },
        "on_busy": {
            "description": "What init does where other processes hold so much of a GPU that the limit cannot be had: "
            "warn and go on, or raise.",
            "enum": ["warn", "raise"],
            "default": "warn",
        },
        "monitor": {
            "description": "What watches the process while it runs: a thread that samples who holds what. Without this "
            "key there is none; {} takes the defaults.",
            "type": "object",
            "additionalProperties": False,
            "properties": _MONITOR,
        },
        "on_pressure": {
            "description": "What is done besides warning where the pressure becomes critical. trim: idle caches are "
            "given back. raise: the next checkpoint of memguard (workload, require) raises. Needs monitor.",
            "type": "array",
            "items": {"enum": ["trim", "raise"]},
            "uniqueItems": True,
            "default": [],
        },
        "doctor": {
            "description": "What `memguard doctor` is told; nothing else looks at it.",
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "ignore": {
                    "description": "Findings that it leaves out, by name: docs/doctor has a page for each.",
                    "type": "array",
                    "items": {"enum": list(NAMES)},
                    "uniqueItems": True,
                    "default": [],
                }
            },
        },
    },
    "if": {"required": ["on_pressure"], "properties": {"on_pressure": {"minItems": 1}}},
    "then": {"required": ["monitor"]},
    "$defs": {"percent": _PERCENT, "size": _SIZE},
}

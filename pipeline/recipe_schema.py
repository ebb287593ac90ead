"""The recipe as a JSON Schema, for editors: completion, descriptions under the pointer, unknown keys underlined.

Generated from the same models that read a recipe; `python -m suture.pipeline.recipe_schema > recipes/recipe.schema.json`
writes the file that ships.
"""

from __future__ import annotations

import json
from typing import Any

from .recipe import Recipe, ReportSettings
from .steps import STEPS

SCHEMA_FILE = "recipe.schema.json"


def recipe_schema() -> dict[str, Any]:
    """Of a recipe file, with every step's settings."""
    schema = Recipe.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    choices = []
    for name, kind in STEPS.items():
        settings = kind.settings.model_json_schema()
        definitions |= settings.pop("$defs", {})
        definitions[f"step {name}"] = settings
        choices.append(
            {
                "title": name,
                "description": kind.summary,
                "type": "object",
                "properties": {name: {"$ref": f"#/$defs/step {name}", "description": kind.summary}},
                "required": [name],
                "additionalProperties": False,
            }
        )
    schema["properties"]["steps"]["items"] = {"oneOf": choices}
    report = f"#/$defs/{ReportSettings.__name__}"
    definitions[ReportSettings.__name__].pop("required", None)  # `sets` may stand for `data`
    several = {"type": "array", "items": {"$ref": "#/$defs/SetSettings"}, "minItems": 1}
    schema["properties"]["report"]["anyOf"] = [{"$ref": report}, several, {"type": "null"}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "suture recipe",
    }


def schema_text() -> str:
    return json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")

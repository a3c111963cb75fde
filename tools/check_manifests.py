"""Holds the manifests of recipes/kubernetes against the operators' schemas: `check_manifests.py CRD.yaml...`.

A CRD (CustomResourceDefinition) is what `kubectl get crd trainjobs.trainer.kubeflow.org -o yaml` prints. What a schema
does not know is an error here, while a cluster would drop it without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

MANIFESTS = Path(__file__).resolve().parents[1] / "recipes" / "kubernetes"


def schemas(crd: dict[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """The schemas of a CRD, by (apiVersion, kind)."""
    for version in crd["spec"]["versions"]:
        schema = version["schema"]["openAPIV3Schema"]
        schema["properties"]["metadata"] = {"type": "object"}  # which Kubernetes itself looks at
        yield (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]), _closed(schema)


def _closed(schema: Any) -> Any:
    """The same in JSON Schema's words, and nothing else is allowed."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(found.get("properties"), dict) and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def faults(manifest: dict[str, Any], known: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """What is wrong with a manifest."""
    kind = (manifest.get("apiVersion", ""), manifest.get("kind", ""))
    if kind not in known:
        return [f"no schema of {kind[1]} {kind[0]} was given"]
    errors = jsonschema.Draft202012Validator(known[kind]).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.absolute_path)) or 'the manifest'}: {error.message}" for error in errors]


def main(crds: list[str]) -> int:
    """Print what is wrong; 1 if anything is."""
    if not crds:
        print(__doc__, file=sys.stderr)
        return 2
    known = dict(one for crd in crds for one in schemas(yaml.safe_load(Path(crd).read_text())))
    status = 0
    for path in sorted(MANIFESTS.glob("*.yaml")):
        found = faults(yaml.safe_load(path.read_text()), known)
        status |= bool(found)
        print("\n".join(f"{path.name}: {fault}" for fault in found) or f"{path.name}: ok")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Certificates of a job's ranks, made by OpenSSL's program as docs/security.md has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

NEW = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
    *("-nodes", "-days", "2"),
)


class Authority:
    """Signs certificates; their files are in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        folder.mkdir(parents=True, exist_ok=True)
        self._make(name, "-keyout", self._file("key"), "-out", self._file("pem"))

    def _file(self, kind: str, name: str = "") -> Path:
        return self.folder / f"{name or self.name}.{kind}"

    def _make(self, name: str, *words: object) -> None:
        command = [*NEW, "-subj", f"/CN={name}", *(str(word) for word in words)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def variables(self, name: str) -> dict[str, str]:
        """Return what a rank's environment needs, with a certificate for it."""
        key, certificate = self._file("key", name), self._file("pem", name)
        signed = ("-CA", self._file("pem"), "-CAkey", self._file("key"), "-extensions", "usr_cert")
        self._make(name, *signed, "-keyout", key, "-out", certificate)
        return {
            "RINGCOMM_TLS": "on",
            "RINGCOMM_TLS_CERT": str(certificate),
            "RINGCOMM_TLS_KEY": str(key),
            "RINGCOMM_TLS_CA": str(self._file("pem")),
        }

"""The package: its layout, manifest and digests, certificate, assembly and verification (package.md).

Verification needs the light base install only; nothing in a package is ever executed or unpickled.
"""

"""The report (acceptance §16): `model` says all, `sections` words it once, `html` and `pdf` draw it, `figures` are its pictures.

Pure: bytes and text out; `commands/report.py` writes them.
"""

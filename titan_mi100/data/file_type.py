"""Detects the type of a data file from its first bytes, and says what to do with one that cannot be read."""

import re

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"  # magic bytes
PACKED = (GZIP, ZSTD, PARQUET)
HEAD = 2**18  # bytes at the file's beginning from which its type is detected; fewer if fewer were unpacked at once
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_FOREIGN = {  # magic bytes -> "is ..." of an error message
    b"\xfd7zXZ\0": "xz-compressed; unpack it first (xz -d)",
    b"BZh": "bzip2-compressed; unpack it first (bzip2 -d)",
    b"\x04\x22\x4d\x18": "lz4-compressed; unpack it first (lz4 -d)",
    b"7z\xbc\xaf": "a 7-Zip archive; unpack it first",
    b"PK\x03\x04": "a zip archive (or what is built on one: .pt, .npz, .xlsx); unpack or convert it first",
    b"\x1f\x8b": "gzipped twice; unpack it once (gzip -d)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed twice; unpack it once (zstd -d)",
    b"PAR1": "parquet inside gzip or zstd; unpack it first (gzip -d, zstd -d)",
    b"ARROW1": "an Arrow file; save it as parquet or JSONL",
    b"\xff\xff\xff\xff": "an Arrow stream (a datasets cache?); save it as parquet or JSONL",
    b"\x93NUMPY": "a NumPy array; write JSONL with input_ids",
    b"\x89HDF": "HDF5; save it as parquet or JSONL",
    b"SQLite": "an SQLite database; export it as JSONL",
    b"\xff\xfe": "UTF-16 or UTF-32; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)",
}
WANTED = (
    "expected JSONL (one JSON object per line), a JSON array of objects, or parquet; JSON may be packed by gzip or zstd"
)
_FROM_CSV = (
    "python -c 'import csv, json, sys; [print(json.dumps(r)) for r in csv.DictReader(sys.stdin)]' < FILE > NEW.jsonl"
)
_LISTS_OF_A_ROW = b"messages conversations prompt completion chosen rejected tools".split()  # keys of one row


def first_byte(text: bytes) -> bytes:
    """The first byte after a byte order mark and white space; empty if there is none."""
    return text.removeprefix(BYTE_ORDER_MARK).lstrip(b" \t\r\n")[:1]


def refusal(head: bytes) -> str:
    """Detect unsupported file types.

    Args:
        head: the first bytes of the (unpacked) file.

    Returns:
        What the file is, with the remedy; continues "FILE: is ...". "" if the file can be read.
    """
    for magic, reason in _FOREIGN.items():
        if head.startswith(magic):
            return reason
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first (tar -x)"
    lines = [line.strip() for line in head.removeprefix(BYTE_ORDER_MARK).splitlines() if first_byte(line)]
    if not head:
        return f"empty; {WANTED}"
    if not lines or lines[0].startswith(b"["):
        return ""
    if len(lines) > 1 and b"\n" not in head:
        return "a text whose lines end in CR alone; convert it: tr '\\r' '\\n' < FILE > NEW.jsonl"
    if len(lines) > 1 and lines[0].endswith(b"},") and all(line.startswith(b"{") for line in lines):
        return "a list of rows without its brackets; cut the commas off: sed 's/,[[:space:]]*$//' FILE > NEW.jsonl"
    if not any(line.startswith(b"{") for line in lines):
        is_csv = len(lines) > 1 and lines[1].count(b",") >= lines[0].count(b",") > 0
        remedy = f"if it is CSV, convert it: {_FROM_CSV}" if is_csv else WANTED
        return f"neither JSON nor parquet: its first line begins with {lines[0][:40].decode('latin-1')!r}; {remedy}"
    # Pretty-printed JSON begins with a line such as `{`. So may a truncated row, but then other lines are complete.
    continues = len(lines) > 1 and lines[0].endswith((b"{", b"[", b",", b":"))
    # a list with a row on each line
    is_listed = any(line.startswith(b"]") or (line.startswith(b"{") and line.endswith(b"},")) for line in lines)
    if continues and (is_listed or not any(line.startswith(b"{") and line.endswith(b"}") for line in lines)):
        match = re.match(rb'\s*\{\s*"([A-Za-z_]\w*)"\s*:\s*\[\s*\{', head.removeprefix(BYTE_ORDER_MARK))
        rows = f"'.{match[1].decode()}[]'" if match and match[1] not in _LISTS_OF_A_ROW else "."
        return f"JSON whose first object takes several lines; write each row on one line: jq -c {rows} FILE > NEW.jsonl"
    return ""

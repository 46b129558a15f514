//! Numbers at an offset of a byte slice; `Problem::Truncated` when they are not all there.

use super::Problem;

/// `len` bytes from `at`.
pub(super) fn slice(bytes: &[u8], at: usize, len: usize) -> Result<&[u8], Problem> {
    at.checked_add(len).and_then(|end| bytes.get(at..end)).ok_or(Problem::Truncated)
}

pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Problem> {
    slice(bytes, at, N).and_then(|part| part.try_into().map_err(|_| Problem::Truncated))
}

pub(super) fn u8_at(bytes: &[u8], at: usize) -> Result<u8, Problem> {
    bytes.get(at).copied().ok_or(Problem::Truncated)
}

pub(super) fn be16(bytes: &[u8], at: usize) -> Result<u16, Problem> {
    array(bytes, at).map(u16::from_be_bytes)
}

pub(super) fn be32(bytes: &[u8], at: usize) -> Result<u32, Problem> {
    array(bytes, at).map(u32::from_be_bytes)
}

pub(super) fn be64(bytes: &[u8], at: usize) -> Result<u64, Problem> {
    array(bytes, at).map(u64::from_be_bytes)
}

pub(super) fn le16(bytes: &[u8], at: usize) -> Result<u16, Problem> {
    array(bytes, at).map(u16::from_le_bytes)
}

pub(super) fn le24(bytes: &[u8], at: usize) -> Result<u32, Problem> {
    array(bytes, at).map(|[a, b, c]| u32::from_le_bytes([a, b, c, 0]))
}

pub(super) fn le32(bytes: &[u8], at: usize) -> Result<u32, Problem> {
    array(bytes, at).map(u32::from_le_bytes)
}

/// A length or offset of a file as an index; too large for this machine is past the end of any slice.
pub(super) fn index(value: impl TryInto<usize>) -> usize {
    value.try_into().unwrap_or(usize::MAX)
}

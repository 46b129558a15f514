//! Numbers at an offset of a byte slice; `None` when they are not all there.

pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

pub(super) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_be_bytes)
}

pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

pub(super) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_be_bytes)
}

pub(super) fn le16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_le_bytes)
}

pub(super) fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_le_bytes)
}

pub(super) fn le64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_le_bytes)
}

/// A length or offset of a file as an index; too large for this machine is past the end of any slice.
pub(super) fn index(value: impl TryInto<usize>) -> usize {
    value.try_into().unwrap_or(usize::MAX)
}

/// Chunks of a RIFF list: name and body, padded to two bytes. A body that the bytes end in is cut short.
pub(super) fn riff(bytes: &[u8]) -> impl Iterator<Item = ([u8; 4], &[u8])> {
    let mut at = 0_usize;
    std::iter::from_fn(move || {
        let (name, length) = (array(bytes, at)?, index(le32(bytes, at + 4)?));
        let start = at + 8;
        let end = start.saturating_add(length).min(bytes.len());
        at = start.saturating_add(length).saturating_add(length & 1).min(bytes.len());
        Some((name, &bytes[start..end]))
    })
}

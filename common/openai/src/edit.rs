//! Cuts and insertions over a body that passes as a stream of chunks.
//!
//! **Invariant:** bytes outside the cuts leave as they came, in order; the whole result does not depend on how the body was chunked.

use std::collections::VecDeque;
use std::ops::Range;

/// One change at a place of the old body.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Edit {
    /// Old bytes that go away; empty for an insertion.
    cut: Range<u64>,
    /// New bytes that stand before what follows `cut.start`.
    insert: Vec<u8>,
}

/// Changes to one body, in order of place. At one offset, insertions come in the order they were added, before a cut.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Edits {
    edits: Vec<Edit>,
}

/// Edits that contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("edit at byte {offset} lies inside another cut; give cuts that do not overlap and insertions outside of them")]
pub struct Overlap {
    /// Where the second edit starts in the old body.
    pub offset: u64,
}

impl Edits {
    /// Sorts and checks: cuts must not overlap, and nothing may be inserted inside a cut.
    pub fn new(
        cuts: impl IntoIterator<Item = Range<usize>>,
        inserts: impl IntoIterator<Item = (usize, Vec<u8>)>,
    ) -> Result<Self, Overlap> {
        let insert = |(at, insert): (usize, Vec<u8>)| Edit { cut: at as u64..at as u64, insert };
        let cut = |cut: Range<usize>| Edit { cut: cut.start as u64..cut.end as u64, insert: Vec::new() };
        let mut edits: Vec<Edit> = inserts.into_iter().map(insert).collect();
        edits.extend(cuts.into_iter().filter(|range| !range.is_empty()).map(cut));
        // Stable: insertions were put in front.
        edits.sort_by_key(|edit| edit.cut.start);
        let inside = edits.windows(2).find(|pair| pair[1].cut.start < pair[0].cut.end);
        match inside {
            Some(pair) => Err(Overlap { offset: pair[1].cut.start }),
            None => Ok(Self { edits }),
        }
    }

    /// Whether the body passes unchanged.
    pub fn is_empty(&self) -> bool {
        self.edits.is_empty()
    }

    /// Length of the new body; edits past the end of the old one do not count.
    pub fn new_len(&self, old_len: u64) -> u64 {
        let here = self.edits.iter().filter(|edit| edit.cut.start <= old_len);
        here.fold(old_len, |len, edit| len + edit.insert.len() as u64 - (edit.cut.end.min(old_len) - edit.cut.start))
    }

    /// The new body at once.
    pub fn apply(&self, body: &[u8]) -> Vec<u8> {
        let mut splicer = Splicer::new(self.clone());
        let mut out = Vec::with_capacity(usize::try_from(self.new_len(body.len() as u64)).unwrap_or(0));
        splicer.feed(body, |piece| out.extend_from_slice(piece.bytes(body)));
        splicer.finish(|inserted| out.extend_from_slice(inserted));
        out
    }
}

/// A piece of the new body.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'e> {
    /// This range of the chunk just fed; zero-copy for callers with reference-counted chunks.
    Kept(Range<usize>),
    /// New bytes.
    Inserted(&'e [u8]),
}

impl<'e> Piece<'e> {
    /// The piece's bytes, given the chunk just fed.
    pub fn bytes<'c: 'e>(self, chunk: &'c [u8]) -> &'e [u8] {
        match self {
            Self::Kept(range) => &chunk[range],
            Self::Inserted(bytes) => bytes,
        }
    }
}

/// Applies [`Edits`] to a body fed in chunks.
#[derive(Debug)]
pub struct Splicer {
    edits: VecDeque<Edit>,
    offset: u64,
}

impl Splicer {
    pub fn new(edits: Edits) -> Self {
        Self { edits: edits.edits.into(), offset: 0 }
    }

    /// Takes the next chunk and yields its part of the new body, in order. Never yields an empty piece.
    pub fn feed(&mut self, chunk: &[u8], mut out: impl FnMut(Piece<'_>)) {
        let (start, end) = (self.offset, self.offset + chunk.len() as u64);
        // Both ends lie within the chunk, so the differences fit.
        let local = |at: u64| (at - start) as usize;
        let keep = |range: Range<u64>, out: &mut dyn FnMut(Piece<'_>)| {
            if !range.is_empty() {
                out(Piece::Kept(local(range.start)..local(range.end)));
            }
        };
        let mut at = start;
        while let Some(edit) = self.edits.front() {
            // An edit that starts at the chunk's end waits for the next one, or for `finish`.
            if edit.cut.start >= end {
                break;
            }
            keep(at..edit.cut.start.max(at), &mut out);
            if !edit.insert.is_empty() {
                out(Piece::Inserted(&edit.insert));
            }
            at = at.max(edit.cut.end.min(end));
            if edit.cut.end > end {
                break;
            }
            self.edits.pop_front();
        }
        keep(at..end, &mut out);
        self.offset = end;
    }

    /// After the last chunk: insertions that stand at the very end. Those beyond it are left out.
    pub fn finish(self, mut out: impl FnMut(&[u8])) {
        for edit in self.edits.iter().filter(|edit| edit.cut.start == self.offset && !edit.insert.is_empty()) {
            out(&edit.insert);
        }
    }
}

#[cfg(test)]
mod tests;

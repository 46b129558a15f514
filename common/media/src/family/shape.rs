//! What one image becomes: runs of texts, of which some are feature positions.

use super::words::{Ids, Word, Words};

/// Upright size in pixels, as the engine sees it; both sides at least 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub width: u32,
    pub height: u32,
}

impl Size {
    pub fn w(self) -> f64 {
        f64::from(self.width)
    }

    pub fn h(self) -> f64 {
        f64::from(self.height)
    }
}

/// `count` times one text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(super) word: Word,
    pub(super) count: u32,
}

/// The expansion of one image, independent of where it stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    pieces: Vec<Piece>,
    tokens: u64,
}

impl Shape {
    /// Makes room for so many texts and runs.
    pub(super) fn reserve(&mut self, pieces: usize) {
        self.pieces.reserve(pieces);
    }

    /// Appends texts around the features.
    pub(super) fn push(&mut self, words: &[Word]) {
        self.pieces.extend(words.iter().map(|&word| Piece { word, count: 1 }));
    }

    /// Appends positions that embeddings fill.
    pub(super) fn features(&mut self, word: Word, count: u64) {
        self.tokens = self.tokens.saturating_add(count);
        if count > 0 {
            self.pieces.push(Piece { word, count: u32::try_from(count).unwrap_or(u32::MAX) });
        }
    }

    pub(super) fn overflows(&self) -> bool {
        self.tokens > u64::from(u32::MAX)
    }

    /// Feature tokens: positions that embeddings fill.
    pub fn tokens(&self) -> u32 {
        u32::try_from(self.tokens).unwrap_or(u32::MAX)
    }

    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Text and ids of the expansion with every run cut to two.
    pub(super) fn sample(&self, words: &Words, ids: &Ids, index: usize) -> (String, Vec<u32>) {
        let (mut text, mut out) = (String::new(), Vec::new());
        for piece in &self.pieces {
            for _ in 0..piece.count.min(2) {
                words.write(piece.word, index, &mut text);
                out.extend(ids.get(piece.word, index).unwrap_or_default());
            }
        }
        (text, out)
    }
}

//! Standard base64 of a byte string that comes in pieces, so that a head, a payload and a tail need not be joined first.

use base64_simd::STANDARD;

/// Appends to `out` the base64 of all that is pushed; at most two bytes wait between calls.
#[derive(Debug)]
pub struct Encoder<'a> {
    out: &'a mut Vec<u8>,
    waiting: [u8; 3],
    waits: usize,
}

impl<'a> Encoder<'a> {
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, waiting: [0; 3], waits: 0 }
    }

    pub fn push(&mut self, mut piece: &[u8]) {
        while self.waits > 0 || piece.len() < 3 {
            let Some((&first, rest)) = piece.split_first() else { return };
            self.waiting[self.waits] = first;
            self.waits += 1;
            piece = rest;
            if self.waits == 3 {
                STANDARD.encode_append(self.waiting, self.out);
                self.waits = 0;
            }
        }
        let (whole, rest) = piece.split_at(piece.len() - piece.len() % 3);
        STANDARD.encode_append(whole, self.out);
        self.waiting[..rest.len()].copy_from_slice(rest);
        self.waits = rest.len();
    }

    /// Writes what still waits, padded.
    pub fn finish(self) {
        STANDARD.encode_append(&self.waiting[..self.waits], self.out);
    }
}

/// Length of the base64 of `bytes` bytes.
pub fn encoded_length(bytes: usize) -> usize {
    bytes.div_ceil(3) * 4
}

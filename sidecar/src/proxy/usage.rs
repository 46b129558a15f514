//! Reads the engine's token counts out of an answer as it passes: `"prompt_tokens": N` and `"cached_tokens": N` of its `usage`.
//!
//! Works on whole answers and on streams alike, however they are cut. The last count of each name wins: streams that report
//! usage with every piece end with the final one. Inside generated text the names stand with escaped quotes and are not met.

const NAMES: [&[u8]; 2] = [b"\"prompt_tokens\":", b"\"cached_tokens\":"];
/// Longest name, a space and the digits of a u32: what may be cut in two by a frame's end.
const TAIL: usize = 16 + 1 + 10;

/// Counts seen so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
    /// End of what was read before, in which a count may have begun.
    tail: Vec<u8>,
}

impl Usage {
    /// The next piece of the answer. O(bytes); allocates nothing after the first.
    pub fn feed(&mut self, piece: &[u8]) {
        let head = &piece[..piece.len().min(TAIL)];
        let mut seam = std::mem::take(&mut self.tail);
        let old = seam.len();
        seam.extend_from_slice(head);
        self.scan(&seam);
        self.scan(piece);
        if piece.len() >= TAIL {
            seam.clear();
            seam.extend_from_slice(&piece[piece.len() - TAIL..]);
        } else {
            seam.drain(..(old + head.len()).saturating_sub(TAIL));
        }
        self.tail = seam;
    }

    fn scan(&mut self, text: &[u8]) {
        for (index, name) in NAMES.iter().enumerate() {
            // The last one that is whole.
            if let Some(count) = memchr::memmem::rfind_iter(text, name).find_map(|at| number(&text[at + name.len()..]))
            {
                *[&mut self.prompt_tokens, &mut self.cached_tokens][index] = Some(count);
            }
        }
    }
}

/// The number that `text` begins with; `None` also when it may go on beyond the end.
fn number(text: &[u8]) -> Option<u32> {
    let text = text.strip_prefix(b" ").unwrap_or(text);
    let digits = text.iter().take_while(|c| c.is_ascii_digit()).count();
    let number = std::str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    (digits < text.len()).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, size: usize) -> (Option<u32>, Option<u32>) {
        let mut usage = Usage::default();
        text.as_bytes().chunks(size).for_each(|piece| usage.feed(piece));
        (usage.prompt_tokens, usage.cached_tokens)
    }

    #[test]
    fn counts_are_found_however_the_answer_is_cut() {
        let text = r#"data: {"choices":[],"usage":{"prompt_tokens":1234,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens": 960,"created_cache_tokens":null}}}

data: [DONE]"#;
        for size in 1..=text.len() {
            assert_eq!(read(text, size), (Some(1234), Some(960)), "{size}");
        }
    }

    #[test]
    fn the_last_count_wins_and_text_does_not_count() {
        let text =
            r#"{"usage":{"prompt_tokens":5,"cached_tokens":0}} {"usage":{"prompt_tokens":7,"cached_tokens":null}}"#;
        assert_eq!(read(text, 1000), (Some(7), Some(0)));
        let quoted = r#"{"content":"say \"prompt_tokens\":9 or \"cached_tokens\":8"}"#;
        for size in 1..=quoted.len() {
            assert_eq!(read(quoted, size), (None, None), "{size}");
        }
        assert_eq!(read(r#"{"prompt_tokens":99999999999,"cached_tokens":12"#, 7), (None, None));
    }
}

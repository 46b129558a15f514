//! What an answer cost, read as it passes: the engine's own counts, else what is known here.

use std::time::Instant;

use super::plan::Told;
use crate::tenants::Admitted;
use crate::tenants::metrics::{Source, TenantMetrics, TokenKind};
use crate::workers::Route;

const NAMES: [&[u8]; 3] = [b"\"prompt_tokens\":", b"\"completion_tokens\":", b"\"cached_tokens\":"];
/// Of all names.
const NAMES_END: &[u8] = b"_tokens\":";
/// Longest name, a space and the digits of a count: what may be cut in two.
const TAIL: usize = 20 + 1 + 10;
/// Begins an event of a stream, and stands in no JSON text.
const EVENT: &[u8] = b"\ndata:";
/// Events of a chat's stream that carry no token: the role in front, `[DONE]` at the end.
const EVENTS_WITHOUT_TOKEN: u64 = 2;

/// The engine's token counts in an answer, whole or streamed, however it is cut: the last of each name counts. Inside generated text the
/// names stand with escaped quotes and are not met.
#[derive(Debug)]
pub struct Usage {
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    /// Events of the stream; 0 = it is none.
    pub events: u64,
    /// Bytes of `EVENT` that have come.
    begun: usize,
    /// End of what was read before, in which a count may have begun.
    tail: Vec<u8>,
}

impl Default for Usage {
    fn default() -> Self {
        let (prompt_tokens, completion_tokens, cached_tokens) = (None, None, None);
        // The first event begins a line too.
        Self { prompt_tokens, completion_tokens, cached_tokens, events: 0, begun: 1, tail: Vec::new() }
    }
}

impl Usage {
    /// The next piece of the answer. O(bytes); allocates nothing after the first.
    pub fn feed(&mut self, piece: &[u8]) {
        self.count_events(piece);
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
        // Nearly all pieces have none of the names: one search in place of three.
        if memchr::memmem::find(text, NAMES_END).is_none() {
            return;
        }
        for (index, name) in NAMES.iter().enumerate() {
            let last = memchr::memmem::rfind_iter(text, name).find_map(|at| number(&text[at + name.len()..]));
            if let Some(count) = last {
                *[&mut self.prompt_tokens, &mut self.completion_tokens, &mut self.cached_tokens][index] = Some(count);
            }
        }
    }

    fn count_events(&mut self, mut piece: &[u8]) {
        while let Some((first, rest)) = piece.split_first() {
            if self.begun == 0 {
                let Some(at) = memchr::memchr(EVENT[0], piece) else { return };
                (self.begun, piece) = (1, &piece[at + 1..]);
            } else if *first == EVENT[self.begun] {
                self.begun += 1;
                piece = rest;
                if self.begun == EVENT.len() {
                    self.events += 1;
                    self.begun = 0;
                }
            } else {
                self.begun = 0;
            }
        }
    }

    /// Counts for the caller's tenant, and settles its prompt. Of a stream without counts (the client did not ask for
    /// `stream_options.include_usage`) the prompt is taken as predicted, and an event for a token.
    pub fn settle(&self, admitted: &mut Admitted, told: &Told, route: &Route, metrics: &TenantMetrics) {
        let tenant = admitted.tenant().name.clone();
        let count = |kind, source, tokens| metrics.tokens(&tenant, kind, source, tokens);
        metrics.request(&tenant);
        let known = |counted: Option<u64>, otherwise: u64| {
            counted.map_or((Source::Estimate, otherwise), |counted| (Source::Engine, counted))
        };
        let (source, prompt) = known(self.prompt_tokens, told.load_tokens.into());
        count(TokenKind::Prompt, source, prompt);
        let (source, cached) = known(self.cached_tokens, route.reused_tokens.into());
        count(TokenKind::Cached, source, cached);
        let streamed = self.events.saturating_sub(EVENTS_WITHOUT_TOKEN);
        let (source, completion) = known(self.completion_tokens, streamed);
        count(TokenKind::Completion, source, completion);
        count(TokenKind::Image, Source::Estimate, told.image_tokens.into());
        admitted.served(self.prompt_tokens, Instant::now());
    }
}

/// The number that `text` begins with; `None` also when it may go on beyond the end.
fn number(text: &[u8]) -> Option<u64> {
    let text = text.strip_prefix(b" ").unwrap_or(text);
    let digits = text.iter().take(11).take_while(|c| c.is_ascii_digit()).count();
    let number = std::str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    (digits < text.len() && digits <= 10).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, size: usize) -> ([Option<u64>; 3], u64) {
        let mut usage = Usage::default();
        text.as_bytes().chunks(size).for_each(|piece| usage.feed(piece));
        ([usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens], usage.events)
    }

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"data: {\\ndata: \\\"prompt_tokens\\\":9\"}}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1234,\"total_tokens\":1239,\"completion_tokens\":5,",
        "\"prompt_tokens_details\":{\"cached_tokens\": 960}}}\r\n\r\ndata: [DONE]\n\n",
    );

    #[test]
    fn counts_and_events_are_found_however_the_answer_is_cut() {
        for size in 1..=STREAM.len() {
            assert_eq!(read(STREAM, size), ([Some(1234), Some(5), Some(960)], 4), "{size}");
        }
    }

    #[test]
    fn a_whole_answer_has_counts_and_no_events() {
        let text = r#"{"choices":[],"usage":{"prompt_tokens":7,"total_tokens":8,"completion_tokens":1,"prompt_tokens_details":null}}"#;
        for size in 1..=text.len() {
            assert_eq!(read(text, size), ([Some(7), Some(1), None], 0), "{size}");
        }
    }

    #[test]
    fn numbers_that_cannot_be_are_none() {
        for text in [r#"{"prompt_tokens":99999999999}"#, r#"{"prompt_tokens":-1}"#, r#"{"prompt_tokens":12"#] {
            assert_eq!(read(text, 7).0[0], None, "{text}");
        }
        let long = format!("{{\"prompt_tokens\":{}}}", "1".repeat(10_000));
        assert_eq!(read(&long, 9000).0[0], None);
    }
}

//! Gemma 3's line breaks: its tokenizer has one token for each of one to four of them, and vLLM 0.32
//! (`Gemma3MultiModalProcessor._apply_token_matches`) joins those that an expansion brings together.

use super::ConfigError;

/// Ids of one to four line breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Newlines {
    one: u32,
    two: u32,
    three: u32,
    four: u32,
}

impl Newlines {
    pub fn new(encode: &mut impl FnMut(&str) -> Option<Vec<u32>>) -> Result<Self, ConfigError> {
        let mut token = |text: &str| match encode(text).as_deref() {
            Some([id]) => Ok(*id),
            _ => Err(ConfigError::NotOneToken { text: text.escape_default().to_string() }),
        };
        Ok(Self { one: token("\n")?, two: token("\n\n")?, three: token("\n\n\n")?, four: token("\n\n\n\n")? })
    }

    /// Length of `tokens` without line breaks at the end, which what follows may join.
    pub fn settled(&self, tokens: &[u32]) -> usize {
        let open = tokens.iter().rev().take_while(|&&token| token == self.one || token == self.two);
        tokens.len() - open.count()
    }

    /// Joins line breaks and moves `starts` along. False when vLLM would not find an expansion again: it looks for its last line
    /// breaks as a token of their own, or in front of two more. `ends` are the positions after each expansion.
    pub fn merge(&self, tokens: &mut Vec<u32>, starts: &mut [u32], ends: &[u32]) -> bool {
        let mut ends = ends.to_vec();
        let passes =
            [([self.one, self.two], self.three), ([self.two, self.one], self.three), ([self.two, self.two], self.four)];
        for (pass, (pair, joined)) in passes.into_iter().enumerate() {
            let (mut out, mut places) = (Vec::with_capacity(tokens.len()), Vec::with_capacity(tokens.len() + 1));
            let mut at = 0;
            while at < tokens.len() {
                places.push(out.len() as u32);
                if tokens[at..].starts_with(&pair) {
                    if pass == 1 && ends.contains(&(at as u32 + 1)) {
                        return false;
                    }
                    places.push(out.len() as u32);
                    out.push(joined);
                    at += 2;
                } else {
                    out.push(tokens[at]);
                    at += 1;
                }
            }
            for start in starts.iter_mut() {
                *start = places[*start as usize];
            }
            // The position of the last token of each expansion, plus one.
            for end in &mut ends {
                *end = places[*end as usize - 1] + 1;
            }
            *tokens = out;
        }
        true
    }
}

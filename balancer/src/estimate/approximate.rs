//! A chain of blocks for a prompt whose tokens are not known: llm-d's pseudo-tokens and hashes. Equal beginnings have equal blocks;
//! no engine knows these hashes, so they serve what was sent where and nothing else.

use fovea_kv::SequenceHash;
use fovea_media::estimate::{Estimate, VideoHints};

use super::{Api, BLOCK_TOKENS_MIN, PREFIX_TOKENS_MAX, Rules, Stream, chain, flatten};
use crate::prepare::ApiPath;

/// Tokens per block of these chains.
pub const BLOCK_TOKENS: u32 = 64;
const _: () = assert!(BLOCK_TOKENS as usize == BLOCK_TOKENS_MIN);
/// A longer body is routed by load: reading it again would take longer than a prefix saves.
const BODY_BYTES_MAX: usize = 32 << 20;

/// The chain of a request's first prompt; empty where llm-d would not hash it. `names`: whatever of model and adapter parts caches.
/// O(body), for the blocking pool.
pub fn approximate(
    path: ApiPath,
    body: &[u8],
    names: &str,
    salt: &str,
    estimate: &Estimate,
    videos: VideoHints,
) -> Vec<SequenceHash> {
    let api = match path {
        ApiPath::ChatCompletions => Api::Chat,
        ApiPath::Completions => Api::Completions,
    };
    let rules = Rules { estimate, videos, tokens_max: PREFIX_TOKENS_MAX };
    let text = Some(body).filter(|body| body.len() <= BODY_BYTES_MAX).and_then(|body| std::str::from_utf8(body).ok());
    let flat = text.and_then(|text| flatten(api, text, rules).ok()).filter(|flat| flat.whole);
    let Some(prompt) = flat.as_ref().and_then(|flat| flat.prompts.first()).map(Stream::bytes) else {
        return Vec::new();
    };
    // A last block that is not full changes with the next turn.
    let blocks = prompt.len() / 4 / BLOCK_TOKENS_MIN;
    chain(names, salt, prompt, BLOCK_TOKENS_MIN, blocks).into_iter().map(SequenceHash).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &str, salt: &str) -> Vec<SequenceHash> {
        approximate(ApiPath::ChatCompletions, body.as_bytes(), "m", salt, &Estimate::default(), VideoHints::default())
    }

    fn turns(count: usize) -> String {
        let turn = |turn: usize| format!(r#"{{"role":"user","content":"{}"}}"#, format!("turn {turn} ").repeat(60));
        let all: Vec<_> = (0..count).map(turn).collect();
        format!(r#"{{"model":"m","messages":[{}]}}"#, all.join(","))
    }

    #[test]
    fn a_later_turn_begins_with_the_blocks_of_the_one_before() {
        let (first, second, other) = (of(&turns(2), ""), of(&turns(3), ""), of(&turns(2), "salt"));
        // 424 bytes per turn and its role: 106 tokens.
        assert_eq!((first.len(), second.len()), (3, 4));
        assert_eq!(first[..], second[..3]);
        assert_ne!(first[0], other[0]);
    }

    #[test]
    fn an_image_is_told_by_its_content() {
        let body = |url: &str| {
            format!(
                r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"{url}"}}}}]}}]}}"#
            )
        };
        let (a, b) = (of(&body("https://example.com/a.png"), ""), of(&body("https://example.com/b.png"), ""));
        // One token of text, 225 of an image that cannot be measured.
        assert_eq!((a.len(), b.len()), (3, 3));
        assert_ne!(a[0], b[0]);
    }

    #[test]
    fn what_cannot_be_read_has_no_chain() {
        for body in ["", "[]", "{", r#"{"messages":7}"#, "\u{0}"] {
            assert!(of(body, "").is_empty(), "{body}");
        }
        assert!(
            approximate(ApiPath::Completions, &[0xff], "m", "", &Estimate::default(), VideoHints::default()).is_empty()
        );
    }
}

//! Identity of an image, and how it is written into the tokens.

use super::digest::first8;
use super::rules::Rules;
use crate::blocks::MediaSpan;
use sha2::{Digest, Sha256};

/// `MM_PAD_SHIFT_VALUE`: text ids lie below, pads at or above.
const PAD_SHIFT: u64 = 1_000_000;

/// Hash of an image as Qwen3-VL servers from 0.5.20 make it: of the artifact key of its bytes, its `detail` and the
/// deployment's processor fingerprint. SGLang's own artifact key is a canonical JSON that cannot be had without its
/// processor; ours takes the same inputs, so that equal images have equal hashes on engines of equal fingerprints and
/// only there. Earlier releases hash the processor's pixels; here they use this hash too.
pub fn item_hash(bytes: &[u8], detail: Option<&str>, fingerprint: &str) -> u64 {
    let content = hex(&Sha256::digest(bytes).into());
    let detail = detail.filter(|detail| *detail != "auto").unwrap_or_default();
    let key = serde_json::json!(["engine-sim-artifact-v1", format!("sha256:{content}"), detail, fingerprint]);
    feature_hash(&Sha256::digest(key.to_string().as_bytes()).into())
}

/// `resolve_multimodal_item_hash` of an artifact key.
pub fn feature_hash(artifact_key: &[u8; 32]) -> u64 {
    let mut hasher = Sha256::new();
    for part in [&b"multimodal-feature-v1"[..], artifact_key, &[0]] {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    u64::from_be_bytes(first8(&hasher.finalize().into()))
}

/// The digest that a client may name as `content_hash`.
pub fn content_hash(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes).into()))
}

/// The pads of an image: one, or four that repeat from the start of each span.
pub fn pads(hash: u64, rules: &Rules) -> Vec<u64> {
    if !rules.wide_pads {
        return vec![PAD_SHIFT + hash % (1 << 30)];
    }
    let mut hasher = Sha256::new();
    hasher.update(b"sglang-mm-wide-pad-v1");
    hasher.update(hash.to_be_bytes());
    let digest: [u8; 32] = hasher.finalize().into();
    let word = |at: &[u8]| at.iter().fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte));
    digest.chunks_exact(8).map(|at| PAD_SHIFT + (word(at) & ((1 << 62) - 1))).collect()
}

/// An item hash as a [`MediaSpan`] holds it.
pub fn span_id(hash: u64) -> String {
    format!("{hash:016x}")
}

/// The tokens that the tree is keyed with: placeholders replaced by pads.
pub fn keyed(tokens: &[u32], media: &[MediaSpan], rules: &Rules) -> Vec<u64> {
    let mut out: Vec<u64> = tokens.iter().map(|token| u64::from(*token)).collect();
    for span in media {
        let pads = pads(u64::from_str_radix(&span.id, 16).unwrap_or(0), rules);
        let places = out.iter_mut().skip(span.start).take(span.tokens);
        places.zip(pads.iter().cycle()).for_each(|(token, pad)| *token = *pad);
    }
    out
}

fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_images_differ_by_detail_and_deployment_alone() {
        let hash = item_hash(b"x", None, "a");
        assert_eq!(hash, item_hash(b"x", Some("auto"), "a"));
        let others = [item_hash(b"y", None, "a"), item_hash(b"x", Some("low"), "a"), item_hash(b"x", None, "b")];
        assert!(!others.contains(&hash));
    }
}

//! Complaints about cache identity (docs/operate/complaints.md) that the hashes alone must answer.

use std::collections::HashSet;

use fovea_kv::sglang::pads::Rule;
use fovea_kv::{BlockSize, MediaId, RoutingView, SequenceHash, root};

const TEXT: u32 = 32;
const IMAGE: u32 = 64;

/// Two blocks of text, four of an image's placeholders, two of text.
fn chain(image: MediaId, root: SequenceHash) -> Vec<SequenceHash> {
    let mut view = RoutingView::default();
    view.push(7, TEXT);
    view.push(151_655, IMAGE);
    view.push(8, TEXT);
    view.mark(TEXT, IMAGE, image);
    let mut hashes = Vec::new();
    view.sequence_hashes(BlockSize::new(16).expect("not zero"), root, &mut hashes);
    hashes
}

fn shared(a: &[SequenceHash], b: &[SequenceHash]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// IDN-02: identities that are equal in their first or last 16, 30, 32 and 248 bits.
#[test]
fn identities_that_share_some_of_their_bits_share_no_block_of_an_image() {
    let one = MediaId([0x5a; 32]);
    let plain = root("", "");
    for bit in [0, 7, 8, 16, 30, 32, 64, 128, 223, 224, 225, 239, 240, 248, 255] {
        let mut other = one;
        other.0[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(shared(&chain(one, plain), &chain(other, plain)), 2, "bit {bit}");
    }
}

/// IDN-02: some hundred images of one size under one question.
#[test]
fn hundreds_of_images_under_one_question_have_chains_of_their_own() {
    let ids = (0..4000_u32).map(|n| MediaId::from_engine_id(&n.to_string()));
    let behind: HashSet<_> = ids.map(|id| chain(id, root("", ""))[2]).collect();
    assert_eq!(behind.len(), 4000);
}

/// IDN-03: placeholders of different images are the same token ids.
#[test]
fn two_images_by_turns_hit_themselves_and_share_only_the_blocks_before() {
    let [a, b] = ["a", "b"].map(|id| chain(MediaId::from_engine_id(id), root("", "")));
    assert_eq!((a.len(), shared(&a, &a), shared(&a, &b)), (8, 8, 2));
    assert!(a[2..].iter().all(|hash| !b.contains(hash)), "nor does a later block meet again");
}

/// IDN-07: hashes whose last 48 digits are zeros, and hashes that differ in their last digits. Up to 0.5.22 SGLang itself keeps only the
/// low 30 bits.
#[test]
fn pads_of_two_images_differ_in_every_rule() {
    for rule in [Rule::Single, Rule::Wide] {
        let all: HashSet<_> = (0..1000_u64).map(|n| rule.pads(0x0123_4567_89ab_cdef ^ n)).collect();
        assert_eq!(all.len(), 1000, "{rule:?}");
        let identity = |eighth: u8| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, eighth]);
            bytes
        };
        assert_ne!(rule.pads_of_identity(&identity(1)), rule.pads_of_identity(&identity(9)), "{rule:?}");
    }
}

/// IDN-09: one prompt under two salts and under none.
#[test]
fn salted_and_unsalted_prompts_are_three_chains() {
    let image = MediaId([1; 32]);
    let [none, one, two] = ["", "t1", "t2"].map(|salt| chain(image, root("", salt)));
    assert_eq!((shared(&none, &one), shared(&none, &two), shared(&one, &two)), (0, 0, 0));
}

/// IDN-12: adapter "ab" with salt "c" against adapter "a" with salt "bc".
#[test]
fn adapter_and_salt_do_not_run_into_each_other() {
    let pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")];
    let roots: HashSet<_> = pairs.map(|(adapter, salt)| root(adapter, salt)).into_iter().collect();
    assert_eq!(roots.len(), pairs.len());
}

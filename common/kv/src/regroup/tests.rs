use super::*;
use crate::{EngineHash, MediaId};

/// Pages of one token in blocks of two. Letters are pages and their tokens: `+a.b.c` stores a chain from its start, `+a>b.c` stores b and
/// c after a, `=a` by hash alone, `-a` removes, `clear`; a prefix `c` means CPU.
fn event(word: &str) -> KvEvent {
    let (tier, word) = match word.as_bytes()[0] {
        b'c' if word != "clear" => (Tier::Cpu, &word[1..]),
        _ => (Tier::Gpu, word),
    };
    let hash = |letter: &str| EngineHash::Int(u64::from(letter.as_bytes()[0]));
    let (parent, letters) =
        word[1..].split_once('>').map_or((None, &word[1..]), |(parent, rest)| (Some(hash(parent)), rest));
    let hashes: Vec<_> = letters.split('.').map(hash).collect();
    let stored = Stored {
        tokens: letters.split('.').map(|letter| u32::from(letter.as_bytes()[0])).collect(),
        hashes: hashes.clone(),
        parent,
        block_size: 1,
        tier,
        lora: None,
        extra: Vec::new(),
        group: 0,
        attention: Attention::Full,
        session: None,
    };
    match word.as_bytes()[0] {
        b'+' => KvEvent::Stored(stored),
        b'=' => KvEvent::Stored(Stored { tokens: Vec::new(), ..stored }),
        b'-' => KvEvent::Removed(Removed { hashes, tier, group: 0 }),
        _ => KvEvent::Cleared,
    }
}

fn letter(hash: EngineHash) -> String {
    let EngineHash::Int(hash) = hash else { panic!("{hash:?}") };
    char::from(hash as u8).to_string()
}

fn show(event: &KvEvent) -> String {
    match event {
        KvEvent::Stored(stored) => {
            assert_eq!(stored.block_size, 2);
            let blocks =
                stored.tokens.chunks(2).map(|pair| pair.iter().map(|&t| char::from(t as u8)).collect::<String>());
            let blocks = blocks.collect::<Vec<_>>();
            assert!(blocks.iter().zip(&stored.hashes).all(|(block, hash)| block.ends_with(&letter(*hash))));
            let parent = stored.parent.map(|parent| letter(parent) + ">").unwrap_or_default();
            format!("{}+{parent}{}", if stored.tier == Tier::Cpu { "c" } else { "" }, blocks.join("."))
        }
        KvEvent::Removed(removed) => {
            let names: Vec<_> = removed.hashes.iter().map(|&hash| letter(hash)).collect();
            format!("{}-{}", if removed.tier == Tier::Cpu { "c" } else { "" }, names.join("."))
        }
        KvEvent::Cleared => "clear".to_owned(),
    }
}

#[track_caller]
fn check(words: &str, expect: &str) {
    let mut regroup = Regroup::new(2);
    let mut out = Vec::new();
    words.split_whitespace().for_each(|word| regroup.apply(event(word), &mut out));
    assert_eq!(out.iter().map(show).collect::<Vec<_>>().join(" "), expect);
}

#[test]
fn a_long_chain_becomes_one_event_and_a_rest_waits() {
    check("+a.b.c.d.e", "+ab.cd");
    check("+a.b.c.d.e +e>f.g.h", "+ab.cd +d>ef.gh");
}

#[test]
fn a_branch_inside_a_block_shares_its_first_page() {
    check("+a.b +a>x.y.z", "+ab +ax.yz");
    check("+a.b +a>x -a", "+ab +ax -b.x");
    check("+a.b +a>x -a +a", "+ab +ax -b.x +ab +ax");
}

#[test]
fn a_block_goes_with_any_of_its_pages_and_the_rest_makes_none() {
    check("+a.b.c.d -c", "+ab.cd -d");
    check("+a.b.c.d -a.b.c.d", "+ab.cd -b.d");
    check("+a.b -b -a +a>b", "+ab -b");
}

#[test]
fn copies_of_a_page_are_counted_and_a_block_comes_once() {
    check("+a.b +a.b -a -b", "+ab");
    check("+a.b +a.b -a -a", "+ab -b");
}

#[test]
fn a_child_before_its_parent_waits_for_it() {
    check("+b>c.d +a.b", "+ab.cd");
    check("+a>b +b>c.d +a", "+ab.cd");
    check("+a>b c+b>c.d +a", "+ab c+b>cd");
    check("+a>a +a>b +b>a", "");
}

#[test]
fn tiers_are_counted_apart() {
    check("+a.b c=a c=b -a.b", "+ab c+ab -b");
    check("+a c+a>b", "");
    check("=a =b +a.b", "+ab");
}

#[test]
fn a_clear_forgets_all() {
    check("+a.b clear +b>c", "+ab clear");
}

#[test]
fn with_one_page_per_block_nothing_changes() {
    let mut regroup = Regroup::new(1).with_max_pages(0);
    let words = ["+a.b", "+a.b", "=x", "-a", "c-q", "clear"];
    let mut out = Vec::new();
    words.iter().for_each(|word| regroup.apply(event(word), &mut out));
    assert_eq!(out, words.map(event));
    assert_eq!(regroup.known_pages(), 0);
}

#[test]
fn what_a_page_is_keyed_by_moves_into_its_block() {
    let KvEvent::Stored(stored) = event("+a.b.c.d") else { panic!("not stored") };
    let (one, two) = (MediaId([1; 32]), MediaId([2; 32]));
    let media = |media: &[(MediaId, i32)]| BlockExtra { media: media.to_vec(), ..BlockExtra::default() };
    let salted = BlockExtra { salt: Some("s".into()), ..media(&[]) };
    let stored = Stored {
        extra: vec![salted, media(&[(one, 0)]), media(&[(one, -1)]), media(&[(one, -2), (two, 0)])],
        lora: Some("l".into()),
        session: Some("fv-1".into()),
        ..stored
    };
    let (mut regroup, mut out) = (Regroup::new(2), Vec::new());
    regroup.apply(KvEvent::Stored(stored), &mut out);
    let KvEvent::Stored(stored) = &out[0] else { panic!("not stored") };
    assert_eq!((stored.lora.as_deref(), stored.session.as_deref(), out.len()), (Some("l"), Some("fv-1"), 1));
    assert_eq!(stored.extra[0], BlockExtra { salt: Some("s".into()), ..media(&[(one, 1)]) });
    assert_eq!(stored.extra[1], media(&[(one, -1), (two, 1)]));
}

#[test]
fn pages_of_another_size_and_groups_without_full_attention_make_no_block() {
    let KvEvent::Stored(pages) = event("+a.b.c.d") else { panic!("not stored") };
    let wide = Stored { hashes: pages.hashes[2..].to_vec(), block_size: 2, ..pages.clone() };
    let broken = Stored { tokens: vec![1; 3], ..pages.clone() };
    let mamba = Stored { attention: Attention::Other, ..pages.clone() };
    let (mut regroup, mut out) = (Regroup::new(2), Vec::new());
    for stored in [broken, mamba.clone(), Stored { block_size: 0, ..pages.clone() }] {
        regroup.apply(KvEvent::Stored(stored), &mut out);
    }
    assert_eq!(out, [KvEvent::Stored(mamba)]);
    regroup.apply(event("+a"), &mut out);
    regroup.apply(KvEvent::Stored(wide), &mut out);
    assert_eq!((out.len(), regroup.known_pages()), (1, 1));
}

#[test]
fn equal_hashes_in_two_groups_are_two_pages() {
    let KvEvent::Stored(stored) = event("+a.b") else { panic!("not stored") };
    let (mut regroup, mut out) = (Regroup::new(2), Vec::new());
    regroup.apply(KvEvent::Stored(Stored { group: 1, ..stored.clone() }), &mut out);
    regroup.apply(KvEvent::Stored(stored), &mut out);
    regroup.apply(event("-a"), &mut out);
    let KvEvent::Stored(other) = &out[0] else { panic!("not stored") };
    assert_eq!((other.group, out.len(), regroup.known_pages()), (1, 3, 4));
}

#[test]
fn a_reset_forgets_the_page_size() {
    let (mut regroup, mut out) = (Regroup::new(2), Vec::new());
    regroup.apply(event("+a.b"), &mut out);
    regroup.reset();
    let KvEvent::Stored(stored) = event("+a.b.c.d") else { panic!("not stored") };
    let wide = Stored { hashes: stored.hashes[..2].to_vec(), block_size: 2, ..stored };
    regroup.apply(KvEvent::Stored(wide), &mut out);
    let KvEvent::Stored(stored) = &out[1] else { panic!("not stored") };
    assert_eq!(stored.block_size, 4);
}

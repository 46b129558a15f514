use super::*;

/// One word per event: `+a.b.c` stores a chain from its start, `+a>b.c` stores b and c after a, `-a` removes. A prefix `c` or `s` to the
/// sign means CPU or storage, `=a` in place of `+` stores by hash alone, `clear`. Letters are blocks, unique in content.
fn event(word: &str) -> KvEvent {
    let (tier, word) = match word.as_bytes()[0] {
        b'c' if word != "clear" => (Tier::Cpu, &word[1..]),
        b's' => (Tier::Storage, &word[1..]),
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

/// Applies `before`, takes the delta, applies `after`: the next delta as `level: -removed +stored`, in letters.
#[track_caller]
fn check(before: &str, after: &str, expect: &str) {
    let mut publisher = Publisher::new(Config::default());
    let mut names = std::collections::HashMap::new();
    let mut play = |publisher: &mut Publisher, words: &str| {
        for word in words.split_whitespace() {
            publisher.apply(&event(word));
            for letter in b'a'..=b'z' {
                if let Some(hash) = publisher.translate(EngineHash::Int(u64::from(letter)), 0) {
                    names.insert(hash, char::from(letter));
                }
            }
        }
    };
    play(&mut publisher, before);
    publisher.take_delta();
    play(&mut publisher, after);
    let delta = publisher.take_delta();
    let mut text = Vec::new();
    for (level, delta) in delta.levels.iter().enumerate() {
        let word = |sign: &str, hashes: &[SequenceHash]| {
            if hashes.is_empty() {
                String::new()
            } else {
                format!(" {sign}{}", hashes.iter().map(|hash| names[hash]).collect::<String>())
            }
        };
        let words = word("-", &delta.removed) + &word("+", &delta.stored);
        if !words.is_empty() {
            text.push(format!("{level}:{words}"));
        }
    }
    assert_eq!(text.join(" "), expect);
}

#[test]
fn a_chain_is_published_parents_first_and_withdrawn_children_first() {
    check("", "+a.b.c", "0: +abc");
    check("+a.b.c", "-a -b -c", "0: -cba");
}

#[test]
fn a_block_without_its_parent_is_not_published() {
    check("", "+a>b.c", "");
    check("+a>b.c", "+a", "0: +abc");
    check("+a.b.c", "-b", "0: -cb");
    check("+a.b.c -b", "+a>b", "0: +bc");
}

#[test]
fn a_second_copy_keeps_a_block_until_it_goes_too() {
    check("+a +a", "-a", "");
    check("+a +a -a", "-a", "0: -a");
}

#[test]
fn what_came_and_went_is_not_told() {
    check("+a", "+a>b -b", "");
    check("+a", "-a +a", "");
}

#[test]
fn a_gpu_prefix_continues_from_cpu_memory() {
    check("+a.b", "c+b>x", "1: +abx");
    check("+a.b c+b>x", "-b", "0: -b 1: -xb");
    check("+a.b c+b>x c=b", "-b", "0: -b");
    check("+a c+a>b s+b>x", "s+x>y", "2: +y");
}

#[test]
fn a_gpu_block_after_a_cpu_stretch_is_not_reached() {
    check("+a c+a>b", "+b>x", "");
    check("+a c+a>b", "+b>x c=x", "1: +x");
}

#[test]
fn an_unknown_block_by_hash_alone_is_left_out() {
    check("+a", "c=x", "");
}

#[test]
fn a_clear_withdraws_everything() {
    check("+a.b c+b>x", "clear", "0: -ba 1: -xba");
    check("+a.b", "clear +a", "0: -b");
}

#[test]
fn a_parent_that_follows_its_own_child_is_refused() {
    check("+b>a", "+a>b", "");
    check("", "+a>a", "");
}

#[test]
fn a_reset_makes_the_next_delta_relative_to_nothing() {
    let mut publisher = Publisher::new(Config::default());
    publisher.apply(&event("+a.b"));
    publisher.take_delta();
    publisher.reset();
    assert!(publisher.take_delta().is_empty());
    publisher.apply(&event("+a"));
    assert_eq!(publisher.take_delta().levels[0].stored.len(), 1);
}

fn stored(word: &str) -> Stored {
    match event(word) {
        KvEvent::Stored(stored) => stored,
        other => unreachable!("{other:?} is no store"),
    }
}

#[test]
fn adapters_and_salts_have_chains_of_their_own() {
    let mut publisher = Publisher::new(Config::default());
    let salt = BlockExtra { salt: Some("s".into()), ..BlockExtra::default() };
    let salted = Stored { extra: vec![salt], ..stored("+b") };
    let adapted = Stored { lora: Some("l".into()), ..stored("+c") };
    for (letter, event) in [(b'a', stored("+a")), (b'b', salted), (b'c', adapted)] {
        publisher.apply(&KvEvent::Stored(Stored { tokens: vec![7], ..event }));
        assert!(publisher.translate(EngineHash::Int(u64::from(letter)), 0).is_some());
    }
    assert_eq!(publisher.gauges().published[0], 3);
}

#[test]
fn an_opaque_block_hides_itself_and_its_children() {
    let mut publisher = Publisher::new(Config::default());
    let opaque = BlockExtra { opaque: true, ..BlockExtra::default() };
    publisher.apply(&KvEvent::Stored(Stored {
        extra: vec![BlockExtra::default(), opaque, BlockExtra::default()],
        ..stored("+a.b.c")
    }));
    let gauges = publisher.gauges();
    assert_eq!((gauges.held[0], gauges.published[0], gauges.opaque, gauges.orphans), (3, 1, 1, 1));
}

#[test]
fn two_engine_hashes_of_one_content_are_one_hash_until_both_go() {
    let mut publisher = Publisher::new(Config::default());
    let same = |group| KvEvent::Stored(Stored { group, ..stored("+a") });
    publisher.apply(&same(0));
    publisher.apply(&same(1));
    assert_eq!((publisher.gauges().published[0], publisher.is_hybrid()), (1, true));
    publisher.apply(&event("-a"));
    assert_eq!(publisher.gauges().published[0], 1);
}

#[test]
fn other_attention_and_other_block_sizes_are_left_out_and_counted() {
    let mut publisher = Publisher::new(Config { block_size: Some(2), ..Config::default() });
    publisher.apply(&event("+a"));
    publisher.apply(&KvEvent::Stored(Stored { attention: Attention::Other, group: 1, ..stored("+b") }));
    publisher.apply(&KvEvent::Removed(Removed { hashes: vec![EngineHash::Int(98)], tier: Tier::Gpu, group: 1 }));
    let expect = Counters { other_block_size: 1, unmapped_stores: 1, other_attention: 1, ..Counters::default() };
    assert_eq!((publisher.counters(), publisher.gauges().known), (expect, 0));
}

#[test]
fn a_long_chain_is_walked_without_recursion() {
    let mut publisher = Publisher::new(Config::default());
    let blocks = 0..50_000_u64;
    let chain = Stored {
        hashes: blocks.clone().map(EngineHash::Int).collect(),
        tokens: vec![1; blocks.count()],
        ..stored("+a")
    };
    publisher.store(&chain);
    publisher.take_delta();
    publisher.remove(&Removed { hashes: vec![EngineHash::Int(0)], tier: Tier::Gpu, group: 0 });
    assert_eq!(publisher.take_delta().levels[0].removed.len(), 50_000);
    assert_eq!(publisher.counters().subtree_blocks, 49_999);
}

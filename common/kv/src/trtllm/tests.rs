use std::collections::HashMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::event::{BlockExtra, Removed, Stored};
use crate::wire::pack::pack;
use crate::{BlockHasher, EngineHash, MediaId, SequenceHash, Tier, chain, root};

const MEDIA: Media = Media { placeholder: Some(99), vocab_size: Some(1000) };
const A: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
const B: &str = "f00102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

/// A block of the queue: tokens are ids or digests, keys are (hash, start offset).
fn block(hash: u64, tokens: &Value, keys: &[(&str, u32)]) -> Value {
    let tokens: Vec<_> =
        tokens.as_array().unwrap().iter().map(|id| json!({"token_id": id, "token_extra_id": 0})).collect();
    let keys: Vec<_> = keys.iter().map(|(hash, start)| json!({"hash": hash, "start_offset": start})).collect();
    json!({"block_hash": hash, "tokens": tokens, "cache_level": 0, "mm_keys": keys, "cache_salt": null})
}

fn stored(event_id: u64, blocks: &[Value]) -> Value {
    json!({"event_id": event_id, "data": {"type": "stored", "parent_hash": null, "blocks": blocks}, "window_size": 8})
}

fn pulled(puller: &mut Puller, items: &Value) -> Vec<Pulled> {
    puller.pull(items.to_string().as_bytes()).unwrap()
}

fn puller() -> Puller {
    Puller::new(MEDIA).with_block_size(4)
}

/// One word per event: `+1.2` blocks, `=1` by hash alone, `-1`, `clear`, or the cause; `c` before it = CPU. The empty removal is `-`.
fn show(pulled: &[Pulled]) -> String {
    let list = |hashes: &[EngineHash]| {
        let hash =
            |hash: &EngineHash| if let EngineHash::Int(hash) = hash { hash.to_string() } else { "digest".into() };
        hashes.iter().map(hash).collect::<Vec<_>>().join(".")
    };
    let tier = |tier| ["", "c", "s"][usize::from(Tier::index(tier))];
    let word = |one: &Pulled| match &one.event {
        Ok(KvEvent::Stored(stored)) if stored.tokens.is_empty() => {
            format!("{}={}", tier(stored.tier), list(&stored.hashes))
        }
        Ok(KvEvent::Stored(stored)) => format!("{}+{}", tier(stored.tier), list(&stored.hashes)),
        Ok(KvEvent::Removed(removed)) => format!("{}-{}", tier(removed.tier), list(&removed.hashes)),
        Ok(KvEvent::Cleared) => "clear".into(),
        Err(cause) => format!("{cause:?}"),
    };
    pulled.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// Tokens of the blocks, then their media as `letter@offset`, `?` when opaque; blocks apart by `|`.
#[track_caller]
fn check(media: Media, blocks: &[(Value, &[(&str, u32)])], expect: &str) {
    let blocks: Vec<_> = blocks.iter().map(|(tokens, keys)| block(1, tokens, keys)).collect();
    let mut out = pulled(&mut Puller::new(media).with_block_size(4), &json!([stored(0, &blocks)]));
    let Ok(KvEvent::Stored(stored)) = out.remove(0).event else { panic!("not stored") };
    let name = |id: &MediaId| {
        [A, B].iter().position(|hash| MediaId::from_engine_id(hash) == *id).map_or("u", |at| ["A", "B"][at])
    };
    let show = |(index, tokens): (usize, &[u32])| {
        let mut words: Vec<_> = tokens.iter().map(u32::to_string).collect();
        let extra = stored.extra.get(index).cloned().unwrap_or_default();
        words.extend(extra.media.iter().map(|(id, offset)| format!("{}@{offset}", name(id))));
        words.extend(extra.opaque.then(|| "?".to_owned()));
        words.join(" ")
    };
    assert_eq!(stored.tokens.chunks(4).enumerate().map(show).collect::<Vec<_>>().join(" | "), expect);
}

#[test]
fn both_managers_give_the_same_blocks() {
    let expect = "1 2 99 99 A@2 | 99 99 7 9 A@-2";
    check(MEDIA, &[(json!([1, 2, 99, 99]), &[(A, 0)]), (json!([99, 99, 7, 9]), &[(A, 2)])], expect);
    check(MEDIA, &[(json!([1, 2, A, 1001]), &[(A, 0)]), (json!([1002, 1003, 7, 9]), &[(A, 2)])], expect);
}

#[test]
fn several_items_in_a_block_start_at_their_runs_or_digests() {
    check(MEDIA, &[(json!([99, 1, 99, 2]), &[(A, 5), (B, 0)])], "99 1 99 2 A@-5 B@2");
    check(MEDIA, &[(json!([A, B, 1001, 2]), &[(A, 0), (B, 0)])], "99 99 99 2 A@0 B@1");
    check(MEDIA, &[(json!([1004, 1, B, 2]), &[(A, 4), (B, 0)])], "99 1 99 2 A@-4 B@2");
    check(MEDIA, &[(json!([99, 1, 99, 2]), &[(A, 0)])], "99 1 99 2 A@0");
}

#[test]
fn items_that_cannot_be_told_apart_are_opaque() {
    check(MEDIA, &[(json!([99, 99, 1, 2]), &[(A, 0), (B, 0)])], "99 99 1 2 ?");
    check(MEDIA, &[(json!([99, 1, 99, 2]), &[(A, 0), (B, 3)])], "99 1 99 2 ?");
    check(MEDIA, &[(json!([A, 1, B, 2]), &[(A, 0)])], "99 1 99 2 ?");
    check(MEDIA, &[(json!([A, 1, 2, 3]), &[(B, 0)])], "99 1 2 3 ?");
    check(MEDIA, &[(json!([1, 2, 3, 4]), &[(A, 0)])], "1 2 3 4 ?");
    check(Media::default(), &[(json!([1, A, 1001, 4]), &[(A, 0)])], "1 0 1001 4 ?");
}

#[test]
fn without_keys_the_digest_in_the_tokens_tells() {
    check(
        MEDIA,
        &[(json!([1, A, 1001, 1002]), &[]), (json!([1003, 7, B, 1001]), &[])],
        "1 99 99 99 A@1 | 99 7 99 99 A@-3 B@2",
    );
    check(MEDIA, &[(json!([1003, 7, 8, 9]), &[])], "99 7 8 9 ?");
    check(MEDIA, &[(json!([1, 99, 99, 2]), &[]), (json!([1, 2, 3, 4]), &[])], "1 99 99 2 ? | 1 2 3 4");
}

#[test]
fn a_uuid_stands_for_itself() {
    check(MEDIA, &[(json!([1, 99, 99, 2]), &[("my-uuid", 0)])], "1 99 99 2 u@1");
    check(MEDIA, &[(json!([1, A, 1001, 2]), &[("my-uuid", 0)])], "1 99 99 2 u@1");
}

#[test]
fn levels_moves_and_removals_are_tiers() {
    let tokens = json!([1, 2, 3, 4]);
    let mut host = block(2, &tokens, &[]);
    host["cache_level"] = json!(1);
    let moved = |id, old: u8, new: u8| {
        json!({"event_id": id, "data": {"type": "updated", "block_hash": 1, "priority": null,
        "cache_level": {"type": "event_diff", "old_value": old, "new_value": new}}, "window_size": 8})
    };
    let removed = |id| json!({"event_id": id, "data": {"type": "removed", "block_hashes": [1, 2]}, "window_size": 8});
    let mut puller = puller();
    let plain = json!([stored(0, &[block(1, &tokens, &[])]), removed(1)]);
    assert_eq!(show(&pulled(&mut puller, &plain)), "+1 -1.2");
    let all = json!([
        stored(0, &[block(1, &tokens, &[]), host, block(3, &tokens, &[])]),
        moved(1, 0, 1),
        moved(2, 1, 1),
        removed(3)
    ]);
    let out = pulled(&mut puller, &all);
    assert_eq!(show(&out), "+1 c+2 +3 c=1 -1 - -1.2 c-1.2 s-1.2");
    assert_eq!(out.iter().map(|one| one.event_id).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 2, 3, 3, 3]);
    let Ok(KvEvent::Stored(third)) = &out[2].event else { panic!("not stored") };
    assert_eq!(third.parent, Some(EngineHash::Int(2)));
    assert_eq!(show(&pulled(&mut puller, &json!([removed(4)]))), "-1.2 c-1.2 s-1.2");
}

#[test]
fn a_partial_last_block_is_left_out_once_the_size_is_known() {
    let (full, part) = (json!([1, 2, 3, 4]), json!([5, 6]));
    let one = |id, tokens: &Value| stored(id, &[block(id, tokens, &[])]);
    let mut unsure = Puller::new(MEDIA);
    assert_eq!(show(&pulled(&mut unsure, &json!([one(1, &full)]))), "Sparse");
    let both = json!([one(1, &part), stored(2, &[block(2, &full, &[]), block(3, &part, &[])]), one(4, &full)]);
    assert_eq!(show(&pulled(&mut unsure, &both)), "- +2 +4");
    assert_eq!(
        show(&pulled(&mut unsure, &json!([one(5, &full), one(6, &part), one(7, &json!([1, 2, 3, 4, 5]))]))),
        "+5 - Sparse"
    );
    assert_eq!(
        show(&pulled(&mut puller(), &json!([stored(0, &[block(1, &part, &[]), block(2, &full, &[])])]))),
        "Sparse"
    );
}

#[test]
fn only_the_largest_window_counts() {
    let of = |id, window: u64| {
        let mut event = stored(id, &[block(id, &json!([1, 2, 3, 4]), &[])]);
        event["window_size"] = json!(window);
        event
    };
    let mut puller = puller();
    assert_eq!(show(&pulled(&mut puller, &json!([of(1, 8), of(2, 16), of(3, 8)]))), "- +2 -");
    assert_eq!(show(&pulled(&mut puller, &json!([of(4, 8)]))), "-");
    assert_eq!(show(&pulled(&mut puller, &json!([of(5, 16), of(6, 32)]))), "clear - +6");
}

#[test]
fn salts_belong_to_the_first_block_and_other_ids_hide_it() {
    let of = |salt: Value, extra_id: u64| {
        let mut first = block(1, &json!([1, 2, 3, 4]), &[]);
        let mut second = block(2, &json!([1, 2, 3, 4]), &[]);
        (first["cache_salt"], second["cache_salt"]) = (salt.clone(), salt);
        second["tokens"][1]["token_extra_id"] = json!(extra_id);
        let Ok(KvEvent::Stored(stored)) = pulled(&mut puller(), &json!([stored(0, &[first, second])])).remove(0).event
        else {
            panic!("not stored")
        };
        stored
            .extra
            .into_iter()
            .map(|extra| (extra.salt.as_deref().map(str::to_owned), extra.opaque))
            .collect::<Vec<_>>()
    };
    assert_eq!(of(json!("s"), 0), [(Some("s".to_owned()), false), (None, false)]);
    assert_eq!(of(json!(7), 0), [(None, true), (None, false)]);
    assert_eq!(of(Value::Null, 5), [(None, false), (None, true)]);
    assert_eq!(of(Value::Null, 0), []);
}

#[test]
fn an_item_that_is_not_understood_leaves_the_others_standing() {
    let good = stored(4, &[block(1, &json!([1, 2, 3, 4]), &[])]);
    let data = |id, data: Value| json!({"event_id": id, "data": data, "attention_dp_rank": 2, "window_size": 8});
    let items = json!([{}, data(0, json!({"type": "created"})), data(1, json!({"type": "moved", "blocks": 3})), data(2, json!({"type": "stored"})),
        data(3, json!({"type": "removed", "block_hashes": "all"})), good, 7, {"event_id": "x"}, data(5, json!(3))]);
    let out = pulled(&mut puller(), &items);
    assert_eq!(show(&out), "- UnknownType Malformed Removal +1 Malformed Malformed Malformed");
    assert_eq!(out.iter().map(|one| one.event_id).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 4, 4, 5]);
    assert_eq!(out.iter().map(|one| one.rank).collect::<Vec<_>>(), [2, 2, 2, 2, 0, 0, 0, 2]);
    for hash in [json!(-1), json!(u64::MAX), json!(A)] {
        let removed = data(0, json!({"type": "removed", "block_hashes": [hash]}));
        assert!(pulled(&mut puller(), &json!([removed]))[0].event.is_ok());
    }
    let removed = data(0, json!({"type": "removed", "block_hashes": [A.to_uppercase()]}));
    assert_eq!(show(&pulled(&mut puller(), &json!([removed]))), "Removal");
}

#[test]
fn a_body_that_is_no_list_is_an_error() {
    assert_eq!(pull(b"[]", MEDIA), Ok(Vec::new()));
    assert_eq!(pull(b"[ { } ,\n{}]", MEDIA), Ok(Vec::new()));
    assert_eq!(pull(b"{\"detail\":1}", MEDIA), Err(DecodeError::NotJson { at: 0 }));
    assert!(matches!(pull(b"[{},\n{", MEDIA), Err(DecodeError::NotJson { at: 4.. })));
    assert!(pull(b"", MEDIA).is_err());
    assert!(matches!(pull(&vec![b' '; MAX_BODY_BYTES + 1], MEDIA), Err(DecodeError::TooLong { .. })));
    let deep = "[".repeat(100_000);
    assert!(pull(deep.as_bytes(), MEDIA).is_err());
    assert!(pull(format!("[{}]", "{},".repeat(2_000_000) + "{}").as_bytes(), MEDIA).is_ok());
}

#[test]
fn too_many_events_are_refused() {
    let body = format!("[{}0]", "0,".repeat(1 << 20));
    assert!(matches!(pull(body.as_bytes(), MEDIA), Err(DecodeError::NotJson { .. })));
}

fn pushed(fields: Value) -> Result<Stored, Skipped> {
    let mut event = json!({"type": "BlockStored", "block_hashes": [1, -2], "parent_block_hash": null, "token_ids": [1, 99, 99, 4],
        "block_size": 2, "lora_id": null, "medium": "GPU"});
    event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let mut batch = push(&pack(&json!([1.5, [event], 0])), MEDIA).unwrap();
    batch.events.pop().ok_or_else(|| batch.skipped[0]).map(|event| match event {
        KvEvent::Stored(stored) => stored,
        other => panic!("{other:?}"),
    })
}

#[test]
fn pushed_blocks_read_like_pulled_ones() {
    let keys =
        json!([[{"type": "mm_key", "hash": A, "start_offset": 0, "uuid": null}], [{"hash": A, "start_offset": 1}]]);
    let media = |stored: Stored| stored.extra.into_iter().map(|extra| extra.media).collect::<Vec<_>>();
    let a = MediaId::from_engine_id(A);
    for tokens in [json!([1, 99, 99, 4]), json!([1, A, 1001, 4])] {
        let stored = pushed(json!({"token_ids": tokens, "mm_keys": keys})).unwrap();
        assert_eq!((&stored.tokens[..], &stored.hashes[1]), (&[1, 99, 99, 4][..], &EngineHash::Int(u64::MAX - 1)));
        assert_eq!(media(stored), [[(a, 1)], [(a, -1)]]);
    }
    assert!(pushed(json!({})).unwrap().extra.iter().all(|extra| extra.opaque));
    assert_eq!(pushed(json!({"token_ids": [1, 2, 3, 4], "mm_keys": [null, []]})).unwrap().extra, []);
    let salted = pushed(json!({"token_ids": [1, 2, 3, 4], "cache_salt": "s"})).unwrap();
    assert_eq!(salted.extra[0], BlockExtra { salt: Some("s".into()), ..BlockExtra::default() });
    assert!(pushed(json!({"token_ids": [1, 2, 3, 4], "lora_id": 3})).unwrap().extra[1].opaque);
}

#[test]
fn a_pushed_event_that_is_not_understood_is_named() {
    assert_eq!(pushed(json!({"mm_keys": [[]]})).unwrap_err(), Skipped::Malformed);
    assert_eq!(pushed(json!({"mm_keys": [[{"hash": A}], []]})).unwrap_err(), Skipped::Malformed);
    assert_eq!(pushed(json!({"mm_keys": [[7], []]})).unwrap_err(), Skipped::Malformed);
    assert_eq!(pushed(json!({"token_ids": [1, 2, 3]})).unwrap_err(), Skipped::Sparse);
    assert_eq!(pushed(json!({"token_ids": [1, 2, 3, null]})).unwrap_err(), Skipped::Malformed);
    assert_eq!(pushed(json!({"token_ids": [1, 2, 3, u64::MAX]})).unwrap_err(), Skipped::Malformed);
    assert_eq!(pushed(json!({"token_ids": [1, 2], "block_size": 0})).unwrap_err(), Skipped::Sparse);
    assert_eq!(pushed(json!({"medium": "TAPE"})).unwrap_err(), Skipped::Malformed);
    let removals =
        json!([1, [{"type": "BlockRemoved", "block_hashes": "all"}, {"type": "x"}, {"type": "AllBlocksCleared"}], 3]);
    let batch = push(&pack(&removals), MEDIA).unwrap();
    assert_eq!(
        (batch.rank, batch.skipped, batch.events),
        (3, vec![Skipped::Removal, Skipped::UnknownType], vec![KvEvent::Cleared])
    );
}

#[test]
fn a_configuration_gives_placeholder_and_vocabulary() {
    let of = |config| Media::of_config(&config);
    assert_eq!(of(json!({"image_token_index": 99, "text_config": {"vocab_size": 1000}})), MEDIA);
    assert_eq!(
        of(json!({"image_token_id": 99, "image_token_index": 5, "vocab_size": 1000, "text_config": {"vocab_size": 7}})),
        MEDIA
    );
    assert_eq!((of(json!([])), of(json!({"vocab_size": -1}))), (Media::default(), Media::default()));
}

fn samples() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/trtllm/events.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Our hashes of the blocks that each event stores.
fn translated(events: impl IntoIterator<Item = KvEvent>) -> Vec<Vec<SequenceHash>> {
    let (mut known, mut hasher) = (HashMap::new(), BlockHasher::default());
    let mut translate = |stored: Stored| {
        let mut before = stored.parent.map_or(root("", ""), |parent| known[&parent]);
        let blocks = stored.hashes.iter().zip(stored.tokens.chunks(stored.block_size as usize)).enumerate();
        let hash = |(index, (hash, tokens)): (usize, (&EngineHash, &[u32]))| {
            hasher.begin();
            hasher.push_tokens(tokens);
            let extra = stored.extra.get(index).cloned().unwrap_or_default();
            assert!(!extra.opaque);
            extra.media.iter().for_each(|(id, offset)| hasher.push_span(id, *offset));
            before = chain(before, hasher.finish());
            known.insert(*hash, before);
            before
        };
        blocks.map(hash).collect()
    };
    let stored = events.into_iter().filter_map(|event| match event {
        KvEvent::Stored(stored) if !stored.tokens.is_empty() => Some(stored),
        _ => None,
    });
    stored.map(&mut translate).collect()
}

#[test]
fn the_samples_of_all_writers_say_the_same_of_the_same_prompts() {
    let (samples, media) = (samples(), Media { placeholder: Some(151_655), vocab_size: Some(152_000) });
    let section = |name: &str| {
        let pulled = pull(samples[name].to_string().as_bytes(), media).unwrap();
        assert!(pulled.iter().all(|one| one.event.is_ok()));
        translated(pulled.into_iter().filter_map(|one| one.event.ok()))
    };
    let (v1, v2) = (section("buffered_events_v1_manager"), section("buffered_events_v2_manager"));
    let batch = push(&pack(&samples["zmq_push_wire"]["batch"]), media).unwrap();
    assert_eq!((batch.events.len(), batch.skipped.len()), (3, 0));
    assert_eq!(batch.events[2], KvEvent::Cleared);
    assert!(matches!(&batch.events[1], KvEvent::Removed(Removed { hashes, .. }) if hashes.len() == 1));
    assert_eq!((v1[0].len(), v1[1].len(), v1.len()), (3, 2, 3));
    assert_eq!(v1[..2], v2);
    assert_eq!(v1[1], translated(batch.events)[0]);
    assert_ne!(v1[1][0], v1[2][0], "another key is another block");
}

proptest! {
    #[test]
    fn changed_bytes_give_events_or_an_error(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let samples = samples();
        let mut body = samples["buffered_events_v2_manager"].to_string().into_bytes();
        let mut payload = pack(&samples["zmq_push_wire"]["batch"]);
        for (at, byte) in changes {
            let (body_at, payload_at) = (at.index(body.len()), at.index(payload.len()));
            (body[body_at], payload[payload_at]) = (byte, byte);
        }
        let _ = (pull(&body, MEDIA), push(&payload, MEDIA));
    }
}

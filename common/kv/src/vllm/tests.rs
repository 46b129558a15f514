use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::event::{Attention, KvEvent, Skipped, Stored};
use crate::wire::pack::pack;
use crate::{EngineHash, MediaId, Tier};

fn one(event: Value) -> Result<KvEvent, Skipped> {
    let mut batch = decode(&pack(&json!([1.5, [event], 0]))).unwrap();
    batch.events.pop().ok_or_else(|| batch.skipped[0])
}

/// A store of two blocks of two tokens, with other fields put in or replaced.
fn stored(fields: Value) -> Result<Stored, Skipped> {
    let mut event = json!({
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": null, "token_ids": [5, 6, 7, 8], "block_size": 2,
        "lora_id": null, "medium": "GPU", "lora_name": null,
    });
    event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    one(event).map(|event| match event {
        KvEvent::Stored(stored) => stored,
        other => panic!("{other:?}"),
    })
}

/// `extra_keys` of the first and second block, as text: media as `number@offset`, salt, `?` when opaque.
#[track_caller]
fn check_extra(fields: Value, expect: [&str; 2]) {
    let stored = stored(fields).unwrap();
    let text = |block: &crate::event::BlockExtra| {
        let name =
            |id: &MediaId| ["a", "b"].into_iter().find(|name| MediaId::from_engine_id(name) == *id).unwrap_or("other");
        let mut words: Vec<_> = block.media.iter().map(|(id, offset)| format!("{}@{offset}", name(id))).collect();
        words.extend(block.salt.as_deref().map(str::to_owned));
        words.extend(block.opaque.then(|| "?".to_owned()));
        words.join(" ")
    };
    assert_eq!(stored.extra.iter().map(text).collect::<Vec<_>>(), expect);
}

#[test]
fn media_are_in_order_of_their_start_and_look_ahead_is_clipped() {
    check_extra(json!({"extra_keys": [[["b", 1], ["a", -3]], [["a", 0], ["b", 2], ["b", 9]]]}), ["a@-3 b@1", "a@0"]);
}

#[test]
fn a_first_string_is_the_adapter_exactly_when_there_is_one() {
    check_extra(json!({"lora_name": "l", "extra_keys": [["l", ["a", 0], "salt"], ["l"]]}), ["a@0 salt", ""]);
    check_extra(json!({"extra_keys": [["salt"], null]}), ["salt", ""]);
}

#[test]
fn keys_that_cannot_be_told_are_opaque() {
    check_extra(json!({"extra_keys": [["salt", "id"], ["id"]]}), ["salt ?", "?"]);
    check_extra(json!({"parent_block_hash": 9, "extra_keys": [["id"], null]}), ["?", ""]);
    check_extra(json!({"extra_keys": [[{"bin": 32}], 3]}), ["?", "?"]);
    check_extra(json!({"extra_keys": [[["a", "b"], ["a", 1, 2]], [["a", 5_000_000_000_u64]]]}), ["?", "?"]);
    check_extra(json!({"lora_id": 1}), ["?", "?"]);
}

#[test]
fn tiers_groups_and_attention_are_read() {
    let of = |fields| stored(fields).map(|stored| (stored.tier, stored.group, stored.attention));
    assert_eq!(of(json!({"medium": null})), Ok((Tier::Gpu, 0, Attention::Full)));
    assert_eq!(of(json!({"medium": "CPU", "group_idx": 3})), Ok((Tier::Cpu, 3, Attention::Full)));
    assert_eq!(
        of(json!({"medium": "STORAGE", "kv_cache_spec_kind": "mla_attention"})),
        Ok((Tier::Storage, 0, Attention::Full))
    );
    assert_eq!(of(json!({"kv_cache_spec_kind": "mamba"})), Ok((Tier::Gpu, 0, Attention::Other)));
    assert_eq!(of(json!({"medium": "TAPE"})), Err(Skipped::Malformed));
}

#[test]
fn the_session_of_the_request_is_kept() {
    let session = |fields| stored(fields).map(|stored| stored.session);
    assert_eq!(session(json!({"session_id": "fv-1"})), Ok(Some("fv-1".into())));
    assert_eq!(session(json!({"session_id": null})), Ok(None));
    assert_eq!(session(json!({"session_id": 1})), Err(Skipped::Malformed));
}

#[test]
fn hashes_keep_the_form_in_which_they_were_sent() {
    let hashes = |hashes| stored(json!({"block_hashes": hashes})).map(|stored| stored.hashes);
    let digest =
        |len: u8| EngineHash::Digest { bytes: std::array::from_fn(|at| if at < len.into() { 7 } else { 0 }), len };
    assert_eq!(hashes(json!([u64::MAX, -2])), Ok(vec![EngineHash::Int(u64::MAX), EngineHash::Int(u64::MAX - 1)]));
    assert_eq!(hashes(json!([{"bin": 32}, {"bin": 16}])), Ok(vec![digest(32), digest(16)]));
    assert_eq!(hashes(json!([{"bin": 33}, 1])), Err(Skipped::Malformed));
    assert_eq!(hashes(json!([{"bin": 0}, 1])), Err(Skipped::Malformed));
}

#[test]
fn blocks_without_tokens_are_known_by_hash_alone() {
    let by_hash = stored(json!({"token_ids": [], "block_size": 0, "medium": "CPU"})).unwrap();
    assert_eq!((by_hash.hashes.len(), by_hash.tokens.len(), by_hash.tier), (2, 0, Tier::Cpu));
}

#[test]
fn tokens_that_do_not_fit_the_blocks_are_sparse() {
    assert_eq!(stored(json!({"token_ids": [1, 2, 3, 4, 5, 6]})).unwrap_err(), Skipped::Sparse);
    assert_eq!(stored(json!({"block_size": 0})).unwrap_err(), Skipped::Sparse);
}

#[test]
fn an_event_that_is_not_understood_leaves_the_others_standing() {
    let good = json!({"type": "BlockRemoved", "block_hashes": [1], "medium": null, "new": {"deep": [[{"x": 1}]]}});
    let events = json!([
        {"type": "BlockMigrated", "block_hashes": "what"},
        good,
        {"type": "BlockStored", "block_hashes": [1]},
        ["BlockRemoved"],
        ["BlockRemoved", [[1]]],
        [7],
        {},
        3,
        ["AllBlocksCleared", "more"],
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "extra_keys": []},
    ]);
    for batch in [json!([1, events]), json!([1, events, null, "more"]), json!({"ts": 1, "events": events, "x": []})] {
        let batch = decode(&pack(&batch)).unwrap();
        assert_eq!((batch.events.len(), batch.rank), (3, 0));
        assert_eq!(batch.events[2], KvEvent::Cleared);
        assert_eq!(batch.skipped.iter().filter(|cause| **cause == Skipped::UnknownType).count(), 1);
        assert_eq!(batch.skipped.len(), 7);
    }
}

#[test]
fn a_removal_of_unreadable_blocks_is_told_apart_unless_nothing_was_stored_there() {
    assert_eq!(one(json!(["BlockRemoved", "all", "GPU"])), Err(Skipped::Removal));
    assert_eq!(one(json!({"type": "BlockRemoved", "block_hashes": [1], "group_idx": "a"})), Err(Skipped::Removal));
    assert_eq!(one(json!(["BlockRemoved", "all", "TAPE"])), Err(Skipped::Malformed));
}

#[test]
fn a_batch_that_cannot_be_walked_is_an_error() {
    let layout = |batch: Value| matches!(decode(&pack(&batch)), Err(DecodeError::Layout { .. }));
    assert!(
        layout(json!([]))
            && layout(json!([1]))
            && layout(json!({"ts": 1}))
            && layout(json!("x"))
            && layout(json!([1, 2, 3]))
    );
    assert_eq!(decode(&[0xc1]), Err(DecodeError::NotMsgpack { at: 0 }));
    assert!(matches!(decode(&[0x92, 0xc0, 0x90, 0xc0]), Err(DecodeError::Layout { at: 3, .. })));
    assert!(matches!(decode(&vec![0; MAX_PAYLOAD_BYTES + 1]), Err(DecodeError::TooLong { .. })));
}

#[test]
fn a_length_that_the_payload_cannot_hold_is_refused_before_it_is_believed() {
    // An array, a map and a string of 2^32 − 1 items or bytes.
    for head in [0xdd, 0xdf, 0xdb] {
        let payload = [0x92, 0xc0, 0x91, head, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(decode(&payload), Err(DecodeError::Truncated { at: payload.len() }));
    }
}

#[test]
fn nesting_of_any_depth_is_passed_over() {
    let mut payload = vec![0x93, 0xc0, 0x91];
    payload.extend(std::iter::repeat_n(0x91, 100_000));
    payload.extend([0xc0, 0xc0]);
    assert_eq!(decode(&payload).unwrap().skipped, [Skipped::Malformed]);
}

/// A valid batch with bytes changed reaches deeper than noise does.
fn sample() -> Vec<u8> {
    let stored = json!({"type": "BlockStored", "block_hashes": [1, {"bin": 32}], "parent_block_hash": 3, "token_ids": [5, 600, 70_000, 8],
        "block_size": 2, "lora_id": null, "medium": "GPU", "lora_name": "l", "extra_keys": [["l", ["a", -4], "s"], null], "group_idx": 0});
    pack(&json!([1.5, [stored, ["BlockRemoved", [1, 2], "CPU", 0], ["AllBlocksCleared"]], 1]))
}

proptest! {
    #[test]
    fn any_bytes_give_a_batch_or_an_error(payload in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&payload);
    }

    #[test]
    fn changed_bytes_give_a_batch_or_an_error(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut payload = sample();
        for (at, byte) in changes {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        let _ = decode(&payload);
    }
}

use proptest::prelude::*;
use serde_json::{Value, json};

use super::pads::Rule;
use super::*;
use crate::event::{KvEvent, Skipped, Stored};
use crate::wire::MAX_PAYLOAD_BYTES;
use crate::wire::pack::pack;
use crate::{EngineHash, Tier};

fn one(event: Value) -> Result<KvEvent, Skipped> {
    let mut batch = decode(&pack(&json!([1.5, [event], 0]))).unwrap();
    batch.events.pop().ok_or_else(|| batch.skipped[0])
}

/// A store of two pages of two tokens, with other fields put in or replaced.
fn stored(fields: Value) -> Result<Stored, Skipped> {
    let mut event = json!({"type": "BlockStored", "block_hashes": [1, -2], "parent_block_hash": null, "token_ids": [5, 6, 7, 8],
        "block_size": 2, "lora_id": null, "medium": "GPU"});
    event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    one(event).map(|event| match event {
        KvEvent::Stored(stored) => stored,
        other => panic!("{other:?}"),
    })
}

#[test]
fn arrays_and_maps_say_the_same_with_and_without_their_defaults() {
    let map = stored(json!({})).unwrap();
    assert_eq!(map.hashes, [EngineHash::Int(1), EngineHash::Int(u64::MAX - 1)]);
    let array = json!(["BlockStored", [1, -2], null, [5, 6, 7, 8], 2, null, "GPU", {}, "more"]);
    for len in 6..=9 {
        let array: Vec<_> = array.as_array().unwrap()[..len].to_vec();
        assert_eq!(one(Value::Array(array)), Ok(KvEvent::Stored(map.clone())), "{len} items");
    }
    assert_eq!(stored(json!({"new": [[{}]]})), Ok(map));
}

#[test]
fn a_salt_belongs_to_the_first_page_of_a_chain() {
    let salt = |stored: Stored| stored.extra.into_iter().map(|extra| extra.salt).collect::<Vec<_>>();
    let salted = stored(json!({"cache_salt": "s", "lora_name": "l", "session_id": "fv-1"})).unwrap();
    assert_eq!((salted.lora.as_deref(), salted.session.as_deref()), (Some("l"), Some("fv-1")));
    assert_eq!(salt(salted), [Some("s".into()), None]);
    assert_eq!(salt(stored(json!({"cache_salt": "s", "parent_block_hash": 9})).unwrap()), []);
    let tail = json!(["BlockStored", [1], null, [5, 6], 2, null, "GPU", {"cache_salt": "s"}]);
    let Ok(KvEvent::Stored(tail)) = one(tail) else { panic!("not stored") };
    assert_eq!(salt(tail), [Some("s".into())]);
}

#[test]
fn an_adapter_without_a_name_is_opaque() {
    assert!(stored(json!({"lora_id": 1})).unwrap().extra.iter().all(|extra| extra.opaque));
    assert_eq!(stored(json!({"lora_id": 1, "lora_name": "l"})).unwrap().extra, []);
}

#[test]
fn media_are_tiers() {
    let tier = |medium: &str| stored(json!({"medium": medium})).map(|stored| stored.tier);
    assert_eq!(tier("GPU"), Ok(Tier::Gpu));
    assert_eq!(tier("CPU_PINNED"), Ok(Tier::Cpu));
    assert_eq!((tier("DISK"), tier("EXTERNAL")), (Ok(Tier::Storage), Ok(Tier::Storage)));
    assert_eq!(tier("TAPE"), Err(Skipped::Malformed));
    assert_eq!(stored(json!({"medium": null})).unwrap().tier, Tier::Gpu);
}

#[test]
fn wide_ids_are_folded_and_stay_pads() {
    let tokens = stored(json!({"token_ids": [999_999, 1_000_000, (1_u64 << 31) - 1, 4_612_000_000_000_000_000_u64]}))
        .unwrap()
        .tokens;
    assert_eq!(tokens[..3], [999_999, 1_000_000, (1 << 31) - 1]);
    assert_eq!(tokens[3], token(4_612_000_000_000_000_000));
    assert!(tokens[3] >= 1 << 31);
    assert_eq!(tokens.iter().map(|&token| is_pad(token)).collect::<Vec<_>>(), [false, true, true, true]);
    assert_eq!(stored(json!({"token_ids": [1, 2, 3, -4]})), Err(Skipped::Malformed));
}

#[test]
fn pairs_are_told_for_the_batch_and_are_not_mixed_with_tokens() {
    let event =
        |tokens: Value| json!({"type": "BlockStored", "block_hashes": [1], "token_ids": tokens, "block_size": 2});
    let of = |events: Value| {
        let batch = decode(&pack(&json!([1, events, 2]))).unwrap();
        assert_eq!(batch.rank, 2);
        (batch.pairs, batch.events.len(), batch.skipped)
    };
    let (pairs, tokens) = (event(json!([[1, 2], [2, 3]])), event(json!([1, 2])));
    assert_eq!(of(json!([pairs, ["AllBlocksCleared"]])), (true, 2, vec![]));
    assert_eq!(of(json!([tokens])), (false, 1, vec![]));
    assert_eq!(of(json!([pairs, tokens])), (true, 1, vec![Skipped::Malformed]));
    assert_eq!(
        of(json!([event(json!([[1, 2], 2])), event(json!([[1, 2, 3], [2, 3, 4]]))])),
        (false, 0, vec![Skipped::Malformed; 2])
    );
    let Ok(KvEvent::Stored(stored)) = one(pairs) else { panic!("not stored") };
    assert_eq!(stored.tokens, [pair(1, 2), pair(2, 3)]);
}

#[test]
fn an_event_that_is_not_understood_leaves_the_others_standing() {
    let events = json!([{"type": "BlockMoved"}, ["BlockRemoved", [1], "GPU", "more"], ["BlockRemoved", "all", "GPU"], ["BlockRemoved", [1], "TAPE"],
        ["BlockStored", [1], null, [1, 2, 3], 2], 7, ["AllBlocksCleared", null]]);
    for batch in
        [json!([1, events]), json!([1, events, null, "more"]), json!({"ts": 1, "events": events, "attn_dp_rank": 0})]
    {
        let batch = decode(&pack(&batch)).unwrap();
        assert_eq!(batch.events.len(), 2);
        let expect = [Skipped::UnknownType, Skipped::Removal, Skipped::Malformed, Skipped::Sparse, Skipped::Malformed];
        assert_eq!(batch.skipped, expect);
    }
    assert!(matches!(decode(&vec![0; MAX_PAYLOAD_BYTES + 1]), Err(DecodeError::TooLong { .. })));
}

#[test]
fn pad_rules_differ_in_width_only_by_the_version() {
    assert_eq!(Rule::Single.pads(0x1_4000_0005), [1_000_005]);
    assert_eq!((Rule::Wide.pads(7).len(), Rule::Wide.width(), Rule::Single.width()), (4, 4, 1));
    assert!(Rule::Wide.pads(7).into_iter().all(is_pad));
}

/// A valid batch with bytes changed reaches deeper than noise does.
fn sample() -> Vec<u8> {
    let stored = json!({"type": "BlockStored", "block_hashes": [1, -2], "parent_block_hash": null, "token_ids": [[5, 6], [6, u64::MAX >> 1]],
        "block_size": 1, "lora_id": null, "medium": "CPU_PINNED", "cache_salt": "s", "session_id": "fv-1"});
    pack(
        &json!([1.5, [stored, ["BlockStored", [3], null, [1, 2], 2, null, "GPU", {"cache_salt": "s"}], ["BlockRemoved", [1, 2], "DISK"]], 1]),
    )
}

proptest! {
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

//! The same request to engines of different kinds.

use std::collections::HashMap;

use fovea_gossip::message::LearntValue;
use fovea_kv::{MediaKey, RoutingView, root};
use fovea_media::header;

use super::*;

/// What stands around a request.
struct World {
    engine: EngineFacts,
    media: MediaSource,
    learnt: HashMap<MediaKey, LearntMedia>,
    media_trusted: bool,
}

const BLOCK: u32 = 4;

fn world(kind: EngineKind) -> World {
    let engine = EngineFacts { kind, exif: kind == EngineKind::Vllm, ..engine(0) };
    World { engine, media: MediaSource::EngineOnly, learnt: HashMap::new(), media_trusted: true }
}

impl World {
    fn prepare(&self, body: &Value) -> Prepared {
        let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
        let body = body.to_string();
        let request = Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap();
        let target = Target {
            learnt: &self.learnt,
            media_trusted: self.media_trusted,
            ..target(&self.engine, BlockSize::new(BLOCK).unwrap(), &self.media)
        };
        preparer.prepare(&request, target)
    }

    fn chat(&self, parts: &[Value]) -> Prepared {
        self.prepare(&json!({"messages": [{"role": "user", "content": parts}]}))
    }

    fn learn(&mut self, key: MediaKey, tokens: u32, value: LearntValue) {
        self.learnt.insert(key, LearntMedia { tokens, value });
    }
}

/// The tokens told to the sidecar, one by one.
fn told(prepared: &Prepared) -> Vec<u32> {
    let runs = prepared.preamble.runs.iter();
    runs.flat_map(|&(token, count)| std::iter::repeat_n(token, count as usize)).collect()
}

fn hashes(tokens: &[u32], spans: &[(u32, u32, MediaId)], pairs: bool) -> Vec<SequenceHash> {
    let mut view = RoutingView::default();
    tokens.iter().for_each(|token| view.push(*token, 1));
    spans.iter().for_each(|&(start, len, id)| view.mark(start, len, id));
    let (view, mut out) = (if pairs { view.to_pairs() } else { view }, Vec::new());
    view.sequence_hashes(BlockSize::new(BLOCK).unwrap(), root("", ""), &mut out);
    out
}

fn named() -> Value {
    json!({"type": "image_url", "image_url": {"url": IMAGE}, "uuid": "mine"})
}

const LONG: &str = "a b c d e f g h i j k l m n o p";

#[test]
fn an_image_that_sglang_was_not_seen_to_take_ends_the_view_and_is_told() {
    let prepared = world(EngineKind::Sglang).chat(&[text(LONG), named(), text("b")]);
    assert_eq!(prepared.view.to_string(), "prefix;reason=media_not_learnt");
    let (preamble, tokens) = (&prepared.preamble, told(&prepared));
    let [slot] = preamble.slots[..] else { panic!("{:?}", preamble.slots) };
    assert_eq!((slot.len, slot.known, preamble.spans.len()), (4, false, 0));
    // Placeholders stand at its positions, and the text behind it is told, too.
    let (start, end) = (slot.start as usize, (slot.start + slot.len) as usize);
    assert!(tokens[start..end].iter().all(|token| *token == tokens[start]) && tokens.len() > end);
    assert!(prepared.counted && prepared.prompt_tokens as usize == tokens.len());
    assert!(!prepared.hashes.is_empty());
    assert_eq!(prepared.hashes, hashes(&tokens[..start], &[], false));
    // Nothing names the image to the engine, and the client does not either.
    assert_eq!((preamble.identities.len(), preamble.cuts.len(), preamble.body_at), (0, 1, 1));
    assert_eq!(prepared.affinity, Some(slot.key.0));
}

#[test]
fn pads_that_were_learnt_stand_in_the_view() {
    let parts = [text(LONG), named(), text("b"), named(), text(LONG)];
    let mut world = world(EngineKind::Sglang);
    let before = world.chat(&parts);
    let [one, two] = before.preamble.slots[..] else { panic!("{:?}", before.preamble.slots) };
    assert_eq!(one.key, two.key);
    for (pads, tokens) in [(vec![1_000_007], 4), (vec![1 << 31 | 5, 1 << 31 | 6, 1_000_003, 1_000_004], 4)] {
        world.learn(one.key, tokens, LearntValue::Pads(pads.clone()));
        let after = world.chat(&parts);
        let mut expect = told(&before);
        for slot in [one, two] {
            (0..slot.len as usize).for_each(|at| expect[slot.start as usize + at] = pads[at % pads.len()]);
        }
        assert_eq!((after.view.to_string().as_str(), told(&after)), ("exact;by=learnt", expect.clone()));
        assert_eq!(after.hashes, hashes(&expect, &[], false));
        assert!(after.preamble.exact && after.preamble.slots.iter().all(|slot| slot.known));
        assert_eq!(after.preamble.root, root("", "").0);
        assert_eq!(after.media.iter().map(|media| (media.id, media.tokens)).collect::<Vec<_>>(), [(None, 4); 2]);
    }
}

#[test]
fn a_count_that_was_seen_stands_before_our_rule() {
    let mut world = world(EngineKind::Sglang);
    let before = world.chat(&[text(LONG), named(), text("b")]);
    let slot = before.preamble.slots[0];
    world.learn(slot.key, 7, LearntValue::Pads(vec![1_000_001]));
    let after = world.chat(&[text(LONG), named(), text("b")]);
    assert_eq!((after.prompt_tokens, after.preamble.slots[0].len), (before.prompt_tokens + 3, 7));
}

#[test]
fn eagle_pools_hash_and_are_told_pairs() {
    let mut world = world(EngineKind::Sglang);
    let tokens = told(&world.chat(&[text(LONG)]));
    world.engine.hash_scheme = HashScheme::Fovea1Pairs;
    let prepared = world.chat(&[text(LONG)]);
    assert_eq!(prepared.hashes, hashes(&tokens, &[], true));
    let pairs: Vec<_> = tokens.windows(2).map(|two| fovea_kv::sglang::pair(two[0], two[1])).collect();
    assert_eq!((told(&prepared), prepared.prompt_tokens as usize), (pairs, tokens.len()));
    // An item of unknown length at the end of what is known is not told: its first position has no pair.
    let detail = json!({"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}});
    let open = world.chat(&[text(LONG), detail]);
    assert_eq!((open.view.to_string().as_str(), open.preamble.slots.len()), ("prefix;reason=media_not_learnt", 0));
    let preamble = fovea_gossip::preamble::encode(&open.preamble);
    assert_eq!(fovea_gossip::preamble::decode(&preamble).as_ref(), Ok(&open.preamble));
}

#[test]
fn trtllm_keys_by_a_learnt_digest_over_placeholders() {
    let (mut world, parts) = (world(EngineKind::TrtLlm), [text(LONG), named(), text(LONG)]);
    let before = world.chat(&parts);
    assert_eq!(before.view.to_string(), "prefix;reason=media_not_learnt");
    let (slot, digest) = (before.preamble.slots[0], MediaId([9; 32]));
    world.learn(slot.key, slot.len, LearntValue::Id(digest));
    let after = world.chat(&parts);
    assert_eq!((after.view.to_string().as_str(), told(&after)), ("exact;by=learnt", told(&before)));
    assert_eq!(after.hashes, hashes(&told(&after), &[(slot.start, slot.len, digest)], false));
    assert_eq!(after.preamble.identities, []);
}

#[test]
fn vllm_slots_are_known_and_a_learnt_identity_wins() {
    let (mut world, parts) = (world(EngineKind::Vllm), [text("a"), named(), text("b")]);
    let before = world.chat(&parts);
    let slot = before.preamble.slots[0];
    assert_eq!((before.view.to_string().as_str(), slot.known, slot.len), ("exact", true, 4));
    assert_eq!(before.preamble.spans[0], (slot.start, slot.len, before.media[0].id.unwrap()));
    // As when the server has media options of its own.
    world.learn(slot.key, 4, LearntValue::Id(MediaId([9; 32])));
    let after = world.chat(&parts);
    assert_eq!((after.view.to_string().as_str(), after.media[0].id), ("exact;by=learnt", Some(MediaId([9; 32]))));
    // The identity that is set stays ours.
    assert_eq!(after.preamble.identities, before.preamble.identities);
    world.learn(slot.key, 4, LearntValue::Id(before.media[0].id.unwrap()));
    assert_eq!(world.chat(&parts).view, ViewKind::Exact);
}

#[test]
fn media_that_is_not_trusted_ends_the_view_and_is_still_told() {
    for kind in [EngineKind::Vllm, EngineKind::Sglang, EngineKind::TrtLlm] {
        let world = World { media_trusted: false, ..world(kind) };
        let prepared = world.chat(&[text(LONG), named(), text("b"), named()]);
        assert_eq!(prepared.view.to_string(), "prefix;reason=media_not_trusted");
        let slots = &prepared.preamble.slots;
        assert_eq!((slots.len(), slots.iter().any(|slot| slot.known), prepared.preamble.spans.len()), (2, false, 0));
        assert_eq!(prepared.hashes, hashes(&told(&prepared)[..slots[0].start as usize], &[], false));
        assert!(prepared.affinity.is_some());
        assert_eq!(prepared.preamble.identities.len(), if kind == EngineKind::Vllm { 2 } else { 0 });
    }
}

#[test]
fn blocks_that_events_do_not_set_apart_are_not_predicted() {
    let view = |kind, version: &str, lora: &str, more: Value| {
        let mut world = world(kind);
        version.clone_into(&mut world.engine.version);
        let mut body = json!({"messages": [{"role": "user", "content": LONG}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
        let body = body.to_string();
        let request = Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap();
        let block_size = BlockSize::new(BLOCK).unwrap();
        let target = Target { lora, ..target(&world.engine, block_size, &world.media) };
        preparer.prepare(&request, target).view.to_string()
    };
    let (none, salted, apart) = (json!({}), json!({"cache_salt": "s"}), json!({"extra_key": "t"}));
    for (kind, version, lora, more, expect) in [
        (EngineKind::Vllm, "0.33.0", "l", &apart, "exact"),
        (EngineKind::Sglang, "0.5.23", "", &apart, "none;reason=extra_key"),
        (EngineKind::Sglang, "0.5.17", "", &salted, "none;reason=cache_salt"),
        (EngineKind::Sglang, "0.5.18", "", &salted, "exact"),
        (EngineKind::Sglang, "0.5.22.post1", "l", &none, "none;reason=lora"),
        (EngineKind::Sglang, "0.5.23", "l", &none, "exact"),
        (EngineKind::Sglang, "", "l", &none, "exact"),
        (EngineKind::TrtLlm, "1.3.0", "l", &none, "none;reason=lora"),
        (EngineKind::TrtLlm, "1.3.0", "", &json!({"prompt_token_ids": [1]}), "none;reason=prompt_token_ids"),
        (EngineKind::Sglang, "", "", &json!({"input_ids": [1]}), "none;reason=input_ids"),
        (EngineKind::Vllm, "", "", &json!({"input_ids": [1]}), "exact"),
    ] {
        assert_eq!(view(kind, version, lora, more.clone()), expect, "{kind:?} {version} {lora} {more}");
    }
}

/// The image behind this URL is not read: its name and its size are known.
fn behind(url: &str, key: MediaKey, sized: bool) -> MediaSource {
    let header = header::read(&fovea_media::data_url::decode(IMAGE).unwrap()).ok();
    MediaSource::Named([(url.to_owned(), Named { key, header: header.filter(|_| sized) })].into())
}

#[test]
fn an_image_left_to_the_engine_is_predicted_once_learnt_and_never_named() {
    let (url, key) = ("https://x/y.png", MediaKey([5; 32]));
    let parts = [text(LONG), json!({"type": "image_url", "image_url": {"url": url}}), text("b")];
    for sized in [true, false] {
        let mut world = world(EngineKind::Vllm);
        world.media = behind(url, key, sized);
        let before = world.chat(&parts);
        assert_eq!(before.view.to_string(), "prefix;reason=media_not_learnt");
        let slot = before.preamble.slots[0];
        assert_eq!((slot.key, slot.len, slot.known), (key, if sized { 4 } else { 1 }, false));
        // Where its length is not known the view ends with one placeholder.
        assert_eq!(before.counted, sized);
        assert_eq!(before.prompt_tokens > slot.start + slot.len, sized);
        world.learn(key, 4, LearntValue::Id(MediaId([9; 32])));
        let after = world.chat(&parts);
        assert_eq!((after.view.to_string().as_str(), after.media[0].id), ("exact;by=learnt", Some(MediaId([9; 32]))));
        assert_eq!(after.preamble.spans, [(slot.start, 4, MediaId([9; 32]))]);
        assert_eq!((after.preamble.identities.len(), after.affinity), (0, Some(key.0)));
    }
}

#[test]
fn another_size_behind_a_learnt_url_is_another_image() {
    let (url, key) = ("https://x/y.png", MediaKey([5; 32]));
    let mut world = world(EngineKind::Vllm);
    world.media = behind(url, key, true);
    world.learn(key, 9, LearntValue::Id(MediaId([9; 32])));
    let prepared = world.chat(&[text(LONG), json!({"type": "image_url", "image_url": {"url": url}})]);
    assert_eq!(prepared.view.to_string(), "prefix;reason=media_count");
    assert_eq!((prepared.preamble.slots[0].len, prepared.preamble.slots[0].known), (4, false));
}

#[test]
fn options_make_another_item_where_they_change_pixels() {
    let key = |kind, detail: Value| {
        let part = json!({"type": "image_url", "image_url": {"url": IMAGE, "detail": detail}});
        world(kind).chat(&[text("a"), part]).preamble.slots[0].key
    };
    assert_eq!(key(EngineKind::Sglang, json!("auto")), key(EngineKind::Sglang, Value::Null));
    assert_ne!(key(EngineKind::Sglang, json!("low")), key(EngineKind::Sglang, Value::Null));
    assert_eq!(key(EngineKind::Vllm, json!("low")), key(EngineKind::Vllm, Value::Null));
}

#[test]
fn prompts_with_log_probabilities_are_stored_and_not_read() {
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": LONG}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        world(EngineKind::Vllm).prepare(&body)
    };
    let plain = chat(json!({"logprobs": true}));
    let asked = chat(json!({"prompt_logprobs": 0}));
    assert_eq!((plain.reads_cache, asked.reads_cache), (true, false));
    assert!(!plain.hashes.is_empty() && plain.hashes == asked.hashes);
    let completion = |more: &str| {
        let body: Value = serde_json::from_str(&format!(r#"{{"prompt": [1, 2, 3, 4]{more}}}"#)).unwrap();
        prepare(ApiPath::Completions, &body, 0).reads_cache
    };
    let rows = ["", r#","echo":true"#, r#","logprobs":1"#, r#","echo":true,"logprobs":1"#].map(completion);
    assert_eq!(rows, [true, true, true, false]);
}

#[test]
fn the_clients_session_is_passed_on() {
    let session = |id: &str| {
        let body = json!({"messages": [{"role": "user", "content": "a"}], "session_id": id});
        world(EngineKind::Sglang).prepare(&body).preamble.session
    };
    assert_eq!(session("s-1").as_deref(), Some("s-1"));
    assert_eq!(session(&"s".repeat(2000)).as_deref(), Some(""));
}

//! Isolated tenants: what the engine is sent, and what is predicted of it, go together.

use fovea_gossip::message::EngineKind;
use fovea_kv::root;

use super::*;

/// What one tenant's request becomes.
struct Sent {
    prepared: Prepared,
    body: Value,
}

fn send(tenant: Option<&str>, body: &Value, engine: &EngineFacts, media: &MediaSource) -> Sent {
    let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
    let isolation = tenant.map(|tenant| Isolation::new(b"a secret of all", tenant));
    let body = body.to_string();
    let request = Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap();
    let target = Target { isolation: isolation.as_ref(), ..target(engine, BlockSize::new(4).unwrap(), media) };
    let (prepared, replaced) = preparer.prepare_body(&request, target, body.as_bytes());
    let sent = edited(replaced.as_deref().unwrap_or(body.as_bytes()), &prepared.preamble);
    Sent { prepared, body: sent }
}

fn ask(rest: &Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": [image(), text("a")]}]});
    body.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
    body
}

#[test]
fn the_salt_that_is_sent_is_the_one_that_is_predicted() {
    for client in [json!({}), json!({"cache_salt": null}), json!({"cache_salt": "x"}), json!({"cache_salt": ""})] {
        let body = ask(&client);
        let sent = |tenant| send(tenant, &body, &engine(0), &MediaSource::EngineOnly);
        let (a, again, b, open) = (sent(Some("a")), sent(Some("a")), sent(Some("b")), sent(None));
        for one in [&a, &b] {
            let salt = one.body["cache_salt"].as_str().unwrap();
            assert_eq!(one.prepared.preamble.root, root("", salt).0, "{client}");
            assert_eq!(one.prepared.view, ViewKind::Exact);
            assert_eq!(one.body["messages"][0]["content"][0]["uuid"], one.prepared.media[0].id.unwrap().to_string());
        }
        assert_eq!((&a.body, &a.prepared.hashes), (&again.body, &again.prepared.hashes));
        assert!(a.prepared.hashes.iter().all(|hash| !b.prepared.hashes.contains(hash)));
        let ids = [&a, &b, &open].map(|one| one.prepared.media[0].id);
        assert!(ids[0] != ids[1] && ids[0] != ids[2] && ids[1] != ids[2]);
        let client = body.get("cache_salt").cloned().unwrap_or_default();
        assert_eq!(open.body.get("cache_salt").cloned().unwrap_or_default(), client, "nobody else's is touched");
    }
}

#[test]
fn a_client_s_salt_counts_within_its_tenant() {
    let sent = |salt: &str| {
        send(Some("a"), &ask(&json!({"cache_salt": salt})), &engine(0), &MediaSource::EngineOnly).body["cache_salt"]
            .clone()
    };
    assert_ne!(sent("x"), sent("y"));
    assert_eq!(sent("x"), sent("x"));
}

#[test]
fn other_edits_keep_their_places() {
    let png = fovea_media::data_url::decode(IMAGE).unwrap();
    let mut part = json!({"type": "image_url", "image_url": {"url": "https://h/a.png"}, "uuid": "u"});
    part["image_url"]["detail"] = json!("low");
    let files = [("https://h/a.png".to_owned(), Ok(png.clone().into()))].into();
    let media = MediaSource::Fetched { files, inline: true };
    let salted = [json!({}), json!({"cache_salt": "x"})];
    for (kind, salt) in [EngineKind::Vllm, EngineKind::Sglang].into_iter().flat_map(|kind| {
        let salted = salted.clone();
        salted.into_iter().map(move |salt| (kind, salt))
    }) {
        // What must go stands in front of, beside and behind the salt.
        let mut body = json!({"kv_transfer_params": {"a": 1}, "model": "m"});
        body.as_object_mut().unwrap().extend(salt.as_object().unwrap().clone());
        body["ec_transfer_params"] = json!({});
        body["messages"] = json!([{"role": "user", "content": [part, text("a")]}]);
        let facts = EngineFacts { kind, ..engine(0) };
        let sent = send(Some("a"), &body, &facts, &media);
        assert_eq!(sent.body["cache_salt"].as_str().map(str::len), Some(64), "{}", sent.body);
        assert!(sent.body.get("kv_transfer_params").is_none() && sent.body.get("ec_transfer_params").is_none());
        let first = &sent.body["messages"][0]["content"][0];
        assert_eq!(fovea_media::data_url::decode(first["image_url"]["url"].as_str().unwrap()).unwrap(), png);
        let own = sent.prepared.media.first().and_then(|media| media.id).map(|id| json!(id.to_string()));
        assert_eq!(first.get("uuid"), own.as_ref(), "{kind:?}");
    }
}

#[test]
fn a_member_that_the_sidecar_adds_in_front_finds_its_place() {
    let facts = EngineFacts { kind: EngineKind::Sglang, ..engine(0) };
    let body = ask(&json!({}));
    let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
    let (text, isolation) = (body.to_string(), Isolation::new(b"s", "a"));
    let request = Request::parse(ApiPath::ChatCompletions, text.as_bytes()).unwrap();
    let media = MediaSource::EngineOnly;
    let target = Target { isolation: Some(&isolation), ..target(&facts, BlockSize::new(4).unwrap(), &media) };
    let (prepared, replaced) = preparer.prepare_body(&request, target, text.as_bytes());
    let mut sent = replaced.unwrap();
    let at = usize::try_from(prepared.preamble.body_at).unwrap();
    sent.splice(at..at, br#""session_id":"fv-1","#.iter().copied());
    let sent: Value = serde_json::from_slice(&sent).unwrap();
    assert_eq!((&sent["session_id"], &sent["model"]), (&json!("fv-1"), &json!("m")));
    assert!(sent["cache_salt"].is_string());
}

#[test]
fn a_model_without_files_is_set_apart_too() {
    let body = ask(&json!({})).to_string();
    let request = Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap();
    let isolation = Isolation::new(b"s", "a");
    let (prepared, replaced) = unprepared_body(&request, Some(&isolation), body.as_bytes());
    assert_eq!(edited(&replaced.unwrap(), &prepared.preamble)["cache_salt"], json!(isolation.salt("")));
    let (_, untouched) = unprepared_body(&request, None, body.as_bytes());
    assert!(untouched.is_none());
}

#[test]
fn an_engine_that_does_not_tell_salts_gets_no_credit() {
    let facts = |version: &str| EngineFacts { kind: EngineKind::Sglang, version: version.to_owned(), ..engine(0) };
    let body = json!({"messages": [{"role": "user", "content": "hello"}]});
    let view = |version| send(Some("a"), &body, &facts(version), &MediaSource::EngineOnly).prepared.view.to_string();
    assert_eq!(["0.5.17", "0.5.18"].map(view), ["none;reason=cache_salt", "exact"]);
}

#[test]
fn an_encoder_renames_images_and_nothing_else() {
    let facts = EngineFacts { kind: EngineKind::Vllm, ..engine(0) };
    let (body, media) = (json!({"messages": [{"role": "user", "content": [image()]}]}), MediaSource::EngineOnly);
    let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Keep).unwrap();
    let text = body.to_string();
    let request = Request::parse(ApiPath::ChatCompletions, text.as_bytes()).unwrap();
    let named = |encoder: Option<[u8; 32]>, isolation: Option<&Isolation>| {
        let target = Target { encoder, isolation, ..target(&facts, BlockSize::new(4).unwrap(), &media) };
        let prepared = preparer.prepare(&request, target);
        (prepared.media[0].id.unwrap(), prepared.preamble.identities.first().map(|identity| identity.id))
    };
    let (plain, set) = named(None, None);
    assert_eq!(set, None, "a client's uuid is kept, so none is set");
    let rule = |id: MediaId, fingerprint: u8| {
        let bytes = [&b"fovea-embedding"[..], &id.0, &[fingerprint; 32]].concat();
        MediaId(*blake3::hash(&bytes).as_bytes())
    };
    assert_eq!(named(Some([7; 32]), None), (rule(plain, 7), Some(rule(plain, 7))));
    assert_ne!(named(Some([8; 32]), None), named(Some([7; 32]), None));
    let one = Isolation::new(b"s", "a");
    assert_eq!(named(Some([7; 32]), Some(&one)).0, rule(one.media_id(plain), 7));
}

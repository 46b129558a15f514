//! Videos and sound: by their bytes, and only as far as a rule can be believed.

use super::*;

/// A short H.264 file.
const VIDEO: &[u8] = include_bytes!("../../../../common/media/tests/containers/h264_25.mp4");

fn video() -> Value {
    json!({"type": "video_url", "video_url": {"url": fovea_media::data_url::encode(VIDEO)}, "uuid": "mine"})
}

fn ask(kind: EngineKind, parts: &[Value], unmeasured_videos: bool) -> (Prepared, String) {
    let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
    let body = json!({"messages": [{"role": "user", "content": parts}]}).to_string();
    let request = Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap();
    let engine = EngineFacts { kind, ..engine(0) };
    let target = Target { unmeasured_videos, ..target(&engine, BlockSize::new(1).unwrap(), &MediaSource::EngineOnly) };
    let prepared = preparer.prepare(&request, target);
    (prepared, body)
}

#[test]
fn a_video_ends_the_view_unless_its_rule_is_to_be_believed() {
    let parts = [text("a b c"), image(), video(), text("d"), image()];
    let (before, body) = ask(EngineKind::Vllm, &parts, false);
    assert_eq!(before.view.to_string(), "prefix;reason=video_not_measured");
    assert_eq!((before.media.len(), before.preamble.slots.len(), before.counted), (1, 1, false));
    let content = MediaId(*blake3::hash(VIDEO).as_bytes());
    let sent = edited(body.as_bytes(), &before.preamble);
    assert_eq!(sent["messages"][0]["content"][2]["uuid"], json!(content.to_string()));

    let (after, _) = ask(EngineKind::Vllm, &parts, true);
    assert_eq!((after.view.to_string().as_str(), after.media.len()), ("exact", 3));
    assert!(after.hashes.starts_with(&before.hashes) && after.preamble.slots.iter().all(|slot| slot.known));
    let slot = after.preamble.slots[1];
    assert!(slot.len > after.media[1].tokens, "times are written beside the features");
    assert_eq!(after.preamble.spans[1], (slot.start, slot.len, content));
    assert_eq!(
        after.preamble.identities,
        before.preamble.identities[..]
            .iter()
            .map(|identity| {
                let tokens = if identity.id == content { after.media[1].tokens } else { identity.tokens };
                fovea_gossip::preamble::Identity { tokens, ..*identity }
            })
            .collect::<Vec<_>>()
    );
}

#[test]
fn other_engines_take_no_video_into_the_view() {
    for kind in [EngineKind::Sglang, EngineKind::TrtLlm] {
        let (prepared, _) = ask(kind, &[text("a"), video()], false);
        assert_eq!(prepared.view.to_string(), "prefix;reason=video");
        assert_eq!((prepared.preamble.slots.len(), prepared.preamble.identities.len()), (0, 0));
        assert_eq!((prepared.preamble.cuts.len(), prepared.affinity.is_some()), (1, true));
    }
}

#[test]
fn what_is_no_video_ends_the_view() {
    let broken = json!({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}});
    let (prepared, _) = ask(EngineKind::Vllm, &[text("a"), broken], false);
    assert_eq!(prepared.view.to_string(), "prefix;reason=video of unknown format or size");
}

#[test]
fn sound_is_named_by_its_bytes_and_ends_the_view() {
    let inline = json!({"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}, "uuid": "mine"});
    let by_url = json!({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,QUJD"}});
    for (part, cuts) in [(inline, 1), (by_url, 0)] {
        let (prepared, _) = ask(EngineKind::Vllm, &[image(), part], false);
        let ids: Vec<_> = prepared.preamble.identities.iter().map(|identity| identity.id).collect();
        assert_eq!(ids[1], MediaId(*blake3::hash(b"ABC").as_bytes()));
        // This model's config names no place for sound.
        assert_eq!((prepared.view.to_string().as_str(), prepared.preamble.cuts.len()), ("none;reason=audio", cuts));
    }
}

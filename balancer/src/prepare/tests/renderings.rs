//! A model of an unknown family is predicted as its renderer shows it: as the rule predicts, where there is one to compare with.

use std::collections::HashMap;
use std::sync::Arc;

use super::*;

/// Sizes that were asked.
#[derive(Default)]
struct Shown(HashMap<(u32, u32), Arc<Rendering>>);

impl Learnt for Shown {
    fn get(&self, _: &fovea_kv::MediaKey) -> Option<LearntMedia> {
        None
    }

    fn rendering(&self, width: u32, height: u32) -> Option<Arc<Rendering>> {
        self.0.get(&(width, height)).cloned()
    }
}

/// Each size becomes so many of the tiny model's pads.
fn pads(sizes: &[(u32, u32, usize)]) -> Shown {
    let shown =
        sizes.iter().map(|&(w, h, count)| ((w, h), Arc::new(Rendering::new(&[593], &vec![593; count]).unwrap())));
    Shown(shown.collect())
}

/// The tiny model under a name that no rule knows.
fn unknown_family() -> Preparer {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(MODEL).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["model_type"] = json!("nobody_knows_vl");
    std::fs::write(&path, config.to_string()).unwrap();
    Preparer::load(dir.path(), ClientUuid::Replace).unwrap()
}

fn prepared(preparer: &Preparer, body: &Value, shown: &Shown, media_trusted: bool) -> Prepared {
    let (body, engine, media) = (body.to_string(), engine(0), MediaSource::EngineOnly);
    let request = Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap();
    let target = Target { learnt: shown, media_trusted, ..target(&engine, BlockSize::new(1).unwrap(), &media) };
    preparer.prepare(&request, target)
}

fn body(parts: &[Value]) -> Value {
    json!({"messages": [{"role": "user", "content": parts}]})
}

/// A PNG's header.
fn png(width: u32, height: u32) -> Value {
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
    file.extend([width.to_be_bytes(), height.to_be_bytes()].concat());
    file.extend([8, 2, 0, 0, 0]);
    let crc = file[12..].iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    });
    file.extend((!crc).to_be_bytes());
    json!({"type": "image_url", "image_url": {"url": fovea_media::data_url::encode(&file)}})
}

#[test]
fn what_was_shown_predicts_as_the_rule_does() {
    let (ruled, unruled) = (Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap(), unknown_family());
    // Captured: 448 × 320 fills 140 positions; 64 × 64 four.
    let shown = pads(&[(448, 320, 140), (64, 64, 4)]);
    let typed = text("<|image_pad|> and");
    for parts in [
        vec![text("a"), png(448, 320), text("b")],
        vec![png(448, 320), image(), png(448, 320)],
        vec![typed.clone(), image(), text("b")],
        vec![image(), typed],
    ] {
        let (rule, got) =
            (prepared(&ruled, &body(&parts), &Shown::default(), true), prepared(&unruled, &body(&parts), &shown, true));
        assert_eq!((&rule.view, &got.view), (&ViewKind::Exact, &ViewKind::Rendered), "{parts:?}");
        assert_eq!((&rule.hashes, &rule.media, &rule.preamble), (&got.hashes, &got.media, &got.preamble), "{parts:?}");
    }
}

#[test]
fn a_size_that_was_not_shown_ends_the_view_before_its_image() {
    let (unruled, shown) = (unknown_family(), pads(&[(64, 64, 4)]));
    let front = prepared(&unruled, &body(&[image(), text("a"), image()]), &shown, true);
    for (parts, images) in [(vec![image(), text("a"), png(448, 320), image()], 1), (vec![png(448, 320), image()], 0)] {
        let got = prepared(&unruled, &body(&parts), &shown, true);
        assert_eq!(got.view.to_string(), "prefix;reason=images of an unknown model family");
        assert_eq!(got.media.len(), images);
        assert!(images == 0 || front.hashes.starts_with(&got.hashes), "{parts:?}");
    }
}

#[test]
fn an_expansion_of_several_runs_is_keyed_as_a_whole_at_a_placeholder_of_several_tokens() {
    // Start mark, pad and end mark are replaced by two rows with breaks between marks.
    let expansion = [590, 593, 593, 198, 593, 593, 198, 591];
    let rendering = Arc::new(Rendering::new(&[590, 593, 591], &expansion).unwrap());
    let shown = Shown([((64, 64), rendering)].into());
    let got = prepared(&unknown_family(), &body(&[text("a"), image(), image()]), &shown, true);
    assert_eq!((&got.view, got.media.len()), (&ViewKind::Rendered, 2));
    assert_eq!((got.media[0].tokens, got.media[1].start), (8, got.media[0].start + 8));
    let spans: Vec<_> = got.preamble.spans.iter().map(|(start, len, _)| (*start, *len)).collect();
    assert_eq!(spans, [(got.media[0].start, 8), (got.media[1].start, 8)]);
    let told = got.preamble.runs.iter().flat_map(|&(token, count)| std::iter::repeat_n(token, count as usize));
    let told: Vec<_> = told.skip(got.media[0].start as usize).take(16).collect();
    assert_eq!(told, [expansion, expansion].concat());
}

#[test]
fn what_holds_for_the_first_image_alone_is_used_for_no_other() {
    let rendering = Arc::new(Rendering::new(&[593], &[593; 4]).unwrap().of_the_first());
    let shown = Shown([((64, 64), rendering)].into());
    let view = |parts: &[Value]| {
        let got = prepared(&unknown_family(), &body(parts), &shown, true);
        (got.view.to_string(), got.media.len())
    };
    assert_eq!(view(&[text("a"), image()]), ("exact;by=renderer".to_owned(), 1));
    assert_eq!(view(&[image(), text("a"), image()]), ("prefix;reason=image_after_the_first".to_owned(), 1));
}

#[test]
fn what_was_shown_holds_for_plain_trusted_images_of_models_without_a_rule() {
    let (unruled, shown) = (unknown_family(), pads(&[(64, 64, 5)]));
    let view = |preparer: &Preparer, body: &Value, trusted| prepared(preparer, body, &shown, trusted).view.to_string();
    let plain = body(&[image()]);
    assert_eq!(view(&unruled, &plain, false), "prefix;reason=media_not_trusted");
    let mut options = plain.clone();
    options["mm_processor_kwargs"] = json!({"max_pixels": 100});
    assert_eq!(view(&unruled, &options, true), "prefix;reason=request processor kwargs");
    let ruled = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
    assert_eq!(view(&ruled, &plain, true), "exact");
}

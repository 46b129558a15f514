use fovea_gossip::message::{EngineKind, HashScheme};
use serde_json::{Value, json};

use super::*;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl");

/// A white PNG of 64 × 64 pixels: header alone, as much as is read. It fills four tokens.
const IMAGE: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJ";

fn engine(max_model_len: u32) -> EngineFacts {
    EngineFacts {
        kind: EngineKind::Vllm,
        version: String::new(),
        engine_model: "m".to_owned(),
        served_names: Vec::new(),
        lora_names: Vec::new(),
        max_model_len,
        exif: true,
        hash_scheme: HashScheme::Fovea1,
        hybrid: false,
    }
}

fn target<'a>(engine: &'a EngineFacts, block_size: BlockSize, media: &'a MediaSource) -> Target<'a> {
    Target {
        engine,
        block_size,
        lora: "",
        media,
        pixels_max: u64::MAX,
        learnt: &NothingLearnt,
        media_trusted: true,
        unmeasured_videos: false,
        isolation: None,
        encoder: None,
    }
}

fn prepare(path: ApiPath, body: &Value, max_model_len: u32) -> Prepared {
    let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
    let (body, engine) = (body.to_string(), engine(max_model_len));
    let request = Request::parse(path, body.as_bytes()).unwrap();
    preparer.prepare(
        &request,
        Target {
            engine: &engine,
            block_size: BlockSize::new(1).unwrap(),
            lora: "",
            media: &MediaSource::EngineOnly,
            pixels_max: 1 << 20,
            learnt: &NothingLearnt,
            media_trusted: true,
            unmeasured_videos: false,
            isolation: None,
            encoder: None,
        },
    )
}

fn image() -> Value {
    json!({"type": "image_url", "image_url": {"url": IMAGE}})
}

fn elsewhere(kind: &str) -> Value {
    json!({"type": kind, kind: {"url": "https://x/y"}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn chat(parts: &[Value]) -> Prepared {
    prepare(ApiPath::ChatCompletions, &json!({"messages": [{"role": "user", "content": parts}]}), 0)
}

/// The view of `parts` knows `images` images and ends inside that of `front`.
#[track_caller]
fn check(parts: &[Value], view: &str, images: usize, front: &[Value]) {
    let (got, front) = (chat(parts), chat(front));
    assert_eq!((got.view.to_string().as_str(), got.media.len()), (view, images));
    assert!(got.hashes.len() < front.hashes.len() && front.hashes.starts_with(&got.hashes));
}

#[test]
fn the_image_is_one_that_can_be_predicted() {
    let prepared = chat(&[text("a"), image()]);
    assert_eq!((prepared.view, prepared.media.len(), prepared.media[0].tokens), (ViewKind::Exact, 1, 4));
}

#[test]
fn the_first_place_that_an_unknown_item_may_take_ends_the_view() {
    let (pad, left) = ("<|image_pad|>", "prefix;reason=image left to the engine");
    check(&[image(), text("a"), elsewhere("image_url")], left, 1, &[image(), text("a"), image()]);
    // The typed pad is where the engine puts the image it fetches.
    check(&[text(pad), elsewhere("image_url")], left, 0, &[text(pad), text("b")]);
    // A known image behind the unknown item takes the typed pad in front of it.
    let parts = [text(pad), text("b"), elsewhere("video_url"), image()];
    check(&parts, "prefix;reason=video", 0, &[text(pad), text("b")]);
    assert!(chat(&parts).prompt_tokens < chat(&[text("b"), elsewhere("video_url")]).prompt_tokens);
}

#[test]
fn an_image_that_engines_refuse_ends_the_view() {
    // 201 × 1 pixels.
    let url = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAMkAAAABCAIAAAD7Hx2L";
    let thin = json!({"type": "image_url", "image_url": {"url": url}});
    let front = [image(), text("a"), image()];
    check(&[image(), text("a"), thin, image()], "prefix;reason=engine_refuses", 1, &front);
}

#[test]
fn a_video_takes_its_start_mark_along() {
    let with = |part| chat(&[text("a"), part]).prompt_tokens;
    // Of an image, the start mark is known.
    assert_eq!(with(elsewhere("video_url")) + 1, with(elsewhere("image_url")));
}

#[test]
fn a_prompt_that_the_engine_refuses_as_too_long_is_not_called_exact() {
    let body = json!({"prompt": [1, 2, 3, 4]});
    let view = |max| prepare(ApiPath::Completions, &body, max).view.to_string();
    assert_eq!([0, 4, 5].map(view), ["exact", "none;reason=longer than max_model_len", "exact"]);
    let several = prepare(ApiPath::Completions, &json!({"prompt": [[1, 2], [3, 4]]}), 4);
    assert_eq!((several.view, several.prompt_tokens, several.hashes.len()), (ViewKind::Exact, 4, 4));
}

/// Guess for a chat with one part; its body is less than 100 bytes beside URLs.
fn guess(part: Value, videos: VideoHints, media_max: u32) -> u32 {
    let body = json!({"messages": [{"role": "user", "content": [part]}]}).to_string();
    let request = Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap();
    request.guessed_tokens(body.len(), Guess { estimate: &Estimate::default(), videos, media_max })
}

#[test]
fn guesses_count_text_and_estimate_media() {
    let check = |part: Value, tokens: u32| {
        let guess = guess(part.clone(), VideoHints::default(), u32::MAX);
        assert!((tokens..tokens + 30).contains(&guess), "{guess}, not {tokens}: {}", &part.to_string()[..40]);
    };
    check(json!("x".repeat(4000)), 1000);
    // An image's bytes are no text; without a size in them it has that of the defaults.
    check(json!({"image_url": format!("data:image/png;base64,{}", "A".repeat(40_000))}), 225);
    check(json!({"image_url": "http://a/b.png"}), 225);
    check(json!({"image_url": IMAGE}), 4);
    check(json!({"video_url": {"url": "http://a/b.mp4"}}), 4500);
    check(json!({"type": "input_audio", "input_audio": {"data": "A".repeat(4000), "format": "wav"}}), 1000);
    check(json!({"audio_url": {"url": format!("data:audio/wav;base64,{}", "A".repeat(4000))}}), 1000);
    check(json!({"audio_url": {"url": "http://a/b.wav"}}), 1024);
    check(json!({"image_embeds": "AAAA"}), 1024);
}

#[test]
fn no_claim_of_a_client_makes_a_guess_without_bound() {
    // 33 bytes that claim 10^6 × 10^6 pixels.
    let huge = json!({"image_url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAPQkAAD0JACAIAAADTD68q"});
    assert!((1 << 20..(1 << 20) + 30).contains(&guess(huge.clone(), VideoHints::default(), u32::MAX)));
    assert!((32_768..32_800).contains(&guess(huge, VideoHints::default(), 32_768)));
    let videos =
        |duration: &str| VideoHints::read(|name| (name == "x-llm-d-video-duration-seconds").then_some(duration));
    for (duration, tokens) in [("2", 900), ("1e9", 1 << 20), ("Inf", 4500), ("-1", 4500)] {
        let guess = guess(json!({"video_url": {"url": "v"}}), videos(duration), u32::MAX);
        assert!((tokens..tokens + 30).contains(&guess), "{duration}: {guess}");
    }
}

/// Every request in the capture of an engine that trusts request options gives the engine's own blocks and count.
#[test]
fn request_options_are_predicted_as_captured() {
    let capture = include_str!("../../../tests/vectors/vllm/bytes_kwargs.jsonl");
    let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Keep).unwrap();
    let engine = EngineFacts { engine_model: "./tiny-qwen3-vl".to_owned(), ..engine(0) };
    let mut compared = 0;
    for line in capture.lines() {
        let record: Value = serde_json::from_str(line).unwrap();
        let body = record["request"].to_string();
        let request = Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap();
        let (block_size, media) = (BlockSize::new(32).unwrap(), &MediaSource::EngineOnly);
        let prepared = preparer.prepare(&request, target(&engine, block_size, media));
        assert_eq!(prepared.view, ViewKind::Exact, "{}", record["name"]);
        assert_eq!(u64::from(prepared.prompt_tokens), record["usage"]["prompt_tokens"].as_u64().unwrap());
        let (id, place) =
            (&record["render"]["mm_hashes"]["image"][0], &record["render"]["mm_placeholders"]["image"][0]);
        assert_eq!(prepared.media[0].id.unwrap().to_string(), id.as_str().unwrap(), "{}", record["name"]);
        let placed = (prepared.media[0].start, prepared.media[0].tokens);
        assert_eq!(placed, (place["offset"].as_u64().unwrap() as u32, place["length"].as_u64().unwrap() as u32));
        compared += 1;
    }
    assert_eq!(compared, 4);
}

#[test]
fn bytes_that_no_engine_reads_are_named_by_their_part() {
    let part = |data: &[u8]| json!({"type": "image_url", "image_url": {"url": fovea_media::data_url::encode(data)}});
    let unreadable = |data: &[u8]| chat(&[text("a"), image(), part(data)]).unreadable.map(|(place, _)| place);
    // A PNG of 60000 × 60000 pixels by a header whose checksum is wrong; a page in place of an image; what may be an image.
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xea\x60\0\0\xea\x60\x08\x02\0\0\0".to_vec();
    png.extend([1, 2, 3, 4]);
    let found = [&png[..], b"<html>", b"no picture"].map(unreadable);
    assert_eq!(found, [Some(1), Some(1), None]);
    let prepared = chat(&[part(b"<html>")]);
    assert_eq!(prepared.view.to_string(), "prefix;reason=image that no engine reads");
}

/// What a sidecar would send to its engine.
fn edited(body: &[u8], preamble: &Preamble) -> Value {
    let cuts = preamble.cuts.iter().map(|&(at, len)| at as usize..(at + len) as usize);
    let inserts =
        preamble.identities.iter().map(|i| (i.insert_at as usize, format!("\"uuid\":\"{}\",", i.id).into_bytes()));
    let edits = fovea_openai::edit::Edits::new(cuts, inserts).unwrap();
    serde_json::from_slice(&edits.apply(body)).unwrap()
}

#[test]
fn fetched_images_stand_in_the_body_with_their_identities() {
    let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
    let png = fovea_media::data_url::decode(IMAGE).unwrap();
    let parts = json!([
        {"uuid": "x", "type": "image_url", "image_url": {"url": "https://h/a.png", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": IMAGE}, "uuid": "y"},
        {"type": "image_url", "image_url": "https://h/b.png"},
    ]);
    let body =
        json!({"messages": [{"role": "user", "content": parts}], "vllm_xargs": {"kv_cache_report_mode": "full"}})
            .to_string();
    let request = Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap();
    let file = |name: &str| (format!("https://h/{name}.png"), Ok(png.clone().into()));
    let (engine, block_size) = (engine(0), BlockSize::new(4).unwrap());
    for inline in [true, false] {
        let media = &MediaSource::Fetched { files: [file("a"), file("b")].into(), inline };
        let target = target(&engine, block_size, media);
        let (prepared, replaced) = preparer.prepare_body(&request, target, body.as_bytes());
        assert_eq!((&prepared.view, prepared.media.len(), replaced.is_some()), (&ViewKind::Exact, 3, inline));
        // Equal bytes are one image, wherever they came from.
        assert!(prepared.media.iter().all(|media| media.id == prepared.media[0].id));
        let sent = edited(replaced.as_deref().unwrap_or(body.as_bytes()), &prepared.preamble);
        assert_eq!(sent["vllm_xargs"], json!({}));
        let content = sent["messages"][0]["content"].as_array().unwrap();
        for (i, part) in content.iter().enumerate() {
            let url = part["image_url"]["url"].as_str().or(part["image_url"].as_str()).unwrap();
            let travels = inline || i == 1;
            assert_eq!(fovea_media::data_url::decode(url).is_ok_and(|bytes| bytes == png), travels, "part {i}");
            let id = prepared.media[0].id.unwrap().to_string();
            assert_eq!(part["uuid"], if travels { json!(id) } else { Value::Null }, "part {i}");
        }
    }
}

#[test]
fn an_image_of_too_many_pixels_is_named_by_its_part() {
    // Headers of 4096 × 4096 and of 60000 × 60000 pixels: over the limit of these tests, and over that of the reader itself.
    for huge in ["iVBORw0KGgoAAAANSUhEUgAAEAAAABAACAIAAAB9wbNA", "iVBORw0KGgoAAAANSUhEUgAA6mAAAOpgCAIAAAAPsOIV"] {
        let huge = json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{huge}")}});
        assert_eq!(chat(&[text("a"), image(), huge]).oversized, Some(1));
    }
    assert_eq!(chat(&[text("a"), image()]).oversized, None);
}

mod dialects;
mod isolation;
mod renderings;
mod videos;

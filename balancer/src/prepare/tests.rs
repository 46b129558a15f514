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

fn prepare(path: ApiPath, body: &Value, max_model_len: u32) -> Prepared {
    let preparer = Preparer::load(Path::new(MODEL), MediaSource::EngineOnly, ClientUuid::Replace).unwrap();
    let (body, engine) = (body.to_string(), engine(max_model_len));
    let request = Request::parse(path, body.as_bytes()).unwrap();
    preparer.prepare(&request, Target { engine: &engine, block_size: BlockSize::new(1).unwrap(), lora: "" })
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

#[test]
fn guesses_count_text_and_media_but_no_image_bytes() {
    let guess =
        |body: &str| Request::parse(ApiPath::ChatCompletions, body.as_bytes()).unwrap().guessed_tokens(body.len());
    let text = json!({"messages": [{"role": "user", "content": "x".repeat(4000)}]}).to_string();
    assert!((1000..1050).contains(&guess(&text)), "{}", guess(&text));
    let url = format!("data:image/png;base64,{}", "A".repeat(40_000));
    let image = json!({"messages": [{"role": "user", "content": [{"image_url": url}]}]}).to_string();
    assert!((1024..1060).contains(&guess(&image)), "{}", guess(&image));
}

use fovea_kv::Run;
use serde_json::{Value, json};

use super::*;
use crate::family::ModelFiles;

const PAD: u32 = 593;

/// One token per word of the table, bytes otherwise.
fn model(config: Value, words: &[(&str, u32)]) -> VisionModel {
    let files = ModelFiles { config: &config, preprocessor: None, processor: None, kwargs: None };
    VisionModel::from_files(&files, |text| Some(encode(text, words))).unwrap()
}

fn encode(mut text: &str, words: &[(&str, u32)]) -> Vec<u32> {
    let mut ids = Vec::new();
    while let Some(byte) = text.bytes().next() {
        let longest = words.iter().filter(|(word, _)| text.starts_with(word)).max_by_key(|(word, _)| word.len());
        let (len, id) = longest.map_or((1, byte.into()), |(word, id)| (word.len(), *id));
        ids.push(id);
        text = &text[len..];
    }
    ids
}

fn qwen() -> VisionModel {
    model(json!({ "model_type": "qwen3_vl", "image_token_id": PAD }), &[])
}

fn items(model: &VisionModel, sizes: &[(u32, u32)]) -> Vec<Item> {
    let item =
        |&(width, height): &(u32, u32)| Item { id: MediaId([7; 32]), shape: model.measure(width, height).unwrap() };
    sizes.iter().map(item).collect()
}

/// The view of `tokens` whose image after `images` is not known, of `all`.
fn until_unknown(tokens: &[u32], images: &[Item], all: usize, model: &VisionModel) -> Option<Expansion> {
    let end = model.place(tokens, images.len(), all)?;
    expand_prefix(&tokens[..end], images, model).ok()
}

#[track_caller]
fn check(got: Result<Expansion, ExpandError>, runs: &[(u32, u32)], spans: &[(u32, u32)]) {
    let got = got.unwrap();
    let runs: Vec<_> = runs.iter().map(|&(token, count)| Run { token, count }).collect();
    assert_eq!(got.view.runs(), runs);
    let found: Vec<_> = got.view.spans().iter().map(|span| (span.start, span.len)).collect();
    assert_eq!(found, spans);
    assert_eq!(got.placed, spans.iter().map(|span| span.0).collect::<Vec<_>>());
}

#[track_caller]
fn check_known(got: Option<Expansion>, runs: &[(u32, u32)], spans: &[(u32, u32)]) {
    check(Ok(got.unwrap()), runs, spans);
}

#[test]
fn each_placeholder_becomes_a_run() {
    let model = qwen();
    let images = items(&model, &[(64, 64), (96, 64)]);
    let runs = [(1, 1), (PAD, 4), (2, 1), (PAD, 6), (3, 1)];
    check(expand(&[1, PAD, 2, PAD, 3], &images, &model), &runs, &[(1, 4), (6, 6)]);
}

#[test]
fn a_typed_placeholder_before_the_template_s_takes_the_image() {
    let model = qwen();
    check(expand(&[PAD, 1, PAD], &items(&model, &[(64, 64)]), &model), &[(PAD, 4), (1, 1), (PAD, 1)], &[(0, 4)]);
}

#[test]
fn text_alone_is_unchanged() {
    check(expand(&[1, 1, PAD], &[], &qwen()), &[(1, 2), (PAD, 1)], &[]);
}

#[test]
fn an_image_without_placeholder_is_an_error() {
    let model = qwen();
    let images = items(&model, &[(64, 64), (64, 64)]);
    let error = expand(&[1, PAD], &images, &model).unwrap_err();
    assert_eq!(error, ExpandError::TooFewPlaceholders { images: 2, placeholders: 1 });
    assert_eq!(until_unknown(&[1, PAD], &images[..1], 2, &model), None);
}

#[test]
fn more_images_than_engines_take_are_an_error() {
    let model = qwen();
    let images = items(&model, &vec![(64, 64); 4097]);
    assert_eq!(expand(&[PAD; 4097], &images, &model).unwrap_err(), ExpandError::TooManyImages { index: 4096 });
    assert_eq!(expand(&[PAD; 4096], &images[..4096], &model).unwrap().placed.len(), 4096);
}

#[test]
fn the_view_ends_in_front_of_an_unknown_image() {
    let model = qwen();
    let images = items(&model, &[(64, 64)]);
    let tokens = [1, PAD, 2, PAD, 3, PAD];
    check_known(until_unknown(&tokens, &images, 3, &model), &[(1, 1), (PAD, 4), (2, 1)], &[(1, 4)]);
    check_known(until_unknown(&tokens, &[], 1, &model), &[(1, 1)], &[]);
}

#[test]
fn separators_belong_to_the_image() {
    let model = model(json!({ "model_type": "pixtral" }), &[("[IMG]", 900), ("[IMG_BREAK]", 901), ("[IMG_END]", 902)]);
    let runs = [(5, 1), (900, 2), (901, 1), (900, 2), (902, 1), (6, 1)];
    check(expand(&[5, 900, 6], &items(&model, &[(32, 32)]), &model), &runs, &[(1, 6)]);
}

#[test]
fn images_that_are_numbered_in_the_prompt_take_their_own_placeholders() {
    let model = model(json!({ "model_type": "phi4mm" }), &[("<|endoftext10|>", 900)]);
    let tokens = encode("a<|image_1|>b<|image_2|>", &[]);
    let images = items(&model, &[(448, 448), (448, 448)]);
    let each = images[0].shape.tokens();
    let runs = [('a'.into(), 1), (900, each), ('b'.into(), 1), (900, each)];
    check(expand(&tokens, &images, &model), &runs, &[(1, each), (each + 2, each)]);
    check_known(until_unknown(&tokens, &images[..1], 2, &model), &runs[..3], &[(1, each)]);
    let swapped = encode("<|image_2|><|image_1|>", &[]);
    assert!(expand(&swapped, &images, &model).is_err());
    assert_eq!(until_unknown(&encode("<|image_1|>", &[]), &[], 2, &model), None);
    assert_eq!((model.image_text(1), model.image_text(2)), (Some("<|image_1|>"), None));
}

#[test]
fn an_image_s_own_position_is_written_in_front_of_it() {
    let words = [
        ("<|image_pad|>", 900),
        ("<image_id>", 901),
        ("</image_id>", 902),
        ("<image>", 903),
        ("</image>", 904),
        ("<slice>", 905),
        ("</slice>", 906),
    ];
    let model = model(json!({ "model_type": "minicpmv4_6" }), &words);
    let one = |digit: char| [(901, 1), (digit.into(), 1), (902, 1), (903, 1), (900, 64), (904, 1)];
    let runs = [one('0'), one('1')].concat();
    check(expand(&[900, 900], &items(&model, &[(448, 448); 2]), &model), &runs, &[(0, 69), (69, 69)]);
    let many = items(&model, &[(448, 448); 257]);
    assert_eq!(expand(&[900; 257], &many, &model).unwrap_err(), ExpandError::TooManyImages { index: 256 });
}

const LINES: [(&str, u32); 7] = [
    ("\n", 11),
    ("\n\n", 12),
    ("\n\n\n", 13),
    ("\n\n\n\n", 14),
    ("<start_of_image>", 900),
    ("<image_soft_token>", 901),
    ("<end_of_image>", 902),
];

/// `tokens` with a Gemma 3 image at each 900, joined: (token, count) and (start, len).
#[track_caller]
fn check_lines(tokens: &[u32], runs: &[(u32, u32)], spans: &[(u32, u32)]) {
    let model = model(json!({ "model_type": "gemma3", "mm_tokens_per_image": 2 }), &LINES);
    let images = items(&model, &vec![(9, 9); spans.len()]);
    check(expand(tokens, &images, &model), runs, spans);
}

#[test]
fn line_breaks_around_an_image_are_joined() {
    let image = [(900, 1), (901, 2), (902, 1)];
    let around = |before: u32, after: &[(u32, u32)]| [&[(before, 1)], &image[..], after].concat();
    check_lines(&[900], &around(12, &[(12, 1)]), &[(0, 6)]);
    check_lines(&[11, 900, 5], &around(13, &[(12, 1), (5, 1)]), &[(0, 6)]);
    check_lines(&[12, 900, 12], &around(14, &[(14, 1)]), &[(0, 6)]);
    check_lines(&[13, 900, 13], &[&[(13, 1)], &around(12, &[(12, 1), (13, 1)])[..]].concat(), &[(1, 6)]);
    // Two images share the token between them.
    check_lines(&[900, 900], &[&around(12, &[(14, 1)])[..], &image, &[(12, 1)]].concat(), &[(0, 6), (5, 6)]);
    // The line break goes to the second image.
    let middle = [&around(12, &[(12, 1), (13, 1)])[..], &image, &[(12, 1)]].concat();
    check_lines(&[900, 11, 900], &middle, &[(0, 6), (6, 6)]);
}

#[test]
fn a_line_break_that_hides_the_end_of_an_image_is_an_error() {
    let model = model(json!({ "model_type": "gemma3" }), &LINES);
    let images = items(&model, &[(9, 9)]);
    assert_eq!(expand(&[900, 11, 5], &images, &model).unwrap_err(), ExpandError::LineBreakAfterImage);
}

#[test]
fn line_breaks_that_an_unknown_image_may_join_are_left_out() {
    let model = model(json!({ "model_type": "gemma3", "mm_tokens_per_image": 2 }), &LINES);
    let images = items(&model, &[(9, 9)]);
    check_known(until_unknown(&[5, 12, 11, 900], &[], 1, &model), &[(5, 1)], &[]);
    let known = [(5, 1), (12, 1), (900, 1), (901, 2), (902, 1)];
    check_known(until_unknown(&[5, 900, 900], &images, 2, &model), &known, &[(1, 5)]);
}

//! Rows of recorded token counts (tests/vectors/tokens/README.md), held against the rules.

mod tokenizer;

use fovea_kv::{MediaId, RoutingView};
use fovea_media::expand::{Item, expand};
use fovea_media::family::{ConfigError, ModelFiles, Refused, Video, VideoModel, VisionModel};
use serde_json::{Map, Value, json};
use tokenizer::Tokenizer;

/// What the rows of one group gave.
#[derive(Debug, Default)]
pub struct Tally {
    pub rows: usize,
    pub equal: usize,
    /// What differs, one line per row.
    pub differences: Vec<String>,
    /// Groups without a rule; their rows are not counted.
    pub unsupported: Vec<String>,
}

/// Holds all rows of a file against the rules.
pub fn check_all(groups: &[Value]) -> Tally {
    let tokenizer = Tokenizer::new();
    let mut tally = Tally::default();
    for group in groups {
        let name = group["family"].as_str().unwrap_or_default();
        let cases = group["cases"].as_array().map(Vec::as_slice).unwrap_or_default();
        let rules = match rules(group, &tokenizer) {
            Ok(rules) => rules,
            Err(ConfigError::UnknownModelType { .. }) => {
                tally.unsupported.push(name.to_owned());
                continue;
            }
            Err(error) => {
                tally.rows += cases.len();
                tally.differences.push(format!("{name}: {error}"));
                continue;
            }
        };
        for case in cases {
            tally.rows += 1;
            let held = match &rules {
                Rules::Images(model) => check(group, case, model, &tokenizer),
                Rules::Videos(model) => check_video(case, model, &tokenizer),
            };
            match held {
                Ok(()) => tally.equal += 1,
                Err(why) => tally.differences.push(format!("{name} {}x{}: {why}", case["w"], case["h"])),
            }
        }
        if let (Some(constant), Rules::Images(model)) = (group["constant"].as_u64(), &rules)
            && model.image_tokens(448, 448).ok().map(u64::from) != Some(constant)
        {
            tally.differences.push(format!("{name}: not {constant} tokens"));
        }
    }
    tally
}

/// Fields of `model_config` that belong to the vision tower.
const OF_VISION: [&str; 3] = ["patch_size", "image_size", "pixel_shuffle_ratio"];

enum Rules {
    Images(VisionModel),
    Videos(VideoModel),
}

fn rules(group: &Value, tokenizer: &Tokenizer) -> Result<Rules, ConfigError> {
    let empty = Map::new();
    let given = group["model_config"].as_object().unwrap_or(&empty);
    let mut config = given.clone();
    let nested = given.iter().filter_map(|(key, value)| Some((key.strip_prefix("vision_config.")?.to_owned(), value)));
    let known = given.iter().filter(|(key, _)| OF_VISION.contains(&key.as_str()));
    let vision: Map<_, _> =
        known.map(|(key, value)| (key.clone(), value)).chain(nested).map(|(key, value)| (key, value.clone())).collect();
    if !vision.is_empty() {
        config.insert("vision_config".to_owned(), vision.into());
    }
    let family = group["family"].as_str().unwrap_or_default();
    config.insert("model_type".to_owned(), json!(family.split(':').next()));
    let (config, processor) = (config.into(), given.clone().into());
    let encode = |text: &str| Some(tokenizer.encode(text));
    let mut files = ModelFiles {
        config: &config,
        preprocessor: group.get("preprocessor_config"),
        processor: Some(&processor),
        kwargs: group.get("call_kwargs"),
    };
    let Some(video) = group.get("video_processor") else {
        return VisionModel::from_files(&files, encode).map(Rules::Images);
    };
    // One group writes the bounds alone.
    let bounds = json!({ "size": video });
    files.preprocessor = Some(if video.get("longest_edge").is_some() { &bounds } else { video });
    VideoModel::from_files(&files, encode).map(Rules::Videos)
}

fn side(case: &Value, key: &str) -> Result<u32, String> {
    case[key].as_u64().and_then(|side| u32::try_from(side).ok()).ok_or(format!("no {key}"))
}

fn check(group: &Value, case: &Value, model: &VisionModel, tokenizer: &Tokenizer) -> Result<(), String> {
    let refused = case.get("error").is_some();
    let shape = match model.measure(side(case, "w")?, side(case, "h")?) {
        Ok(shape) => shape,
        Err(_) if refused => return Ok(()),
        // Rows of vLLM's own formula also have an answer for images that its processor refuses.
        Err(Refused::TooThin { formula, .. }) if of_vllm(group) && case["tokens"] == formula => return Ok(()),
        Err(error) => return Err(error.to_string()),
    };
    if refused {
        return Err(format!("{} tokens, not refused", shape.tokens()));
    }
    if case["tokens"].as_u64().is_some_and(|tokens| tokens != u64::from(shape.tokens())) {
        return Err(format!("{} tokens, not {}", shape.tokens(), case["tokens"]));
    }
    let Some(placeholder) = group["placeholder"].as_str() else { return Ok(()) };
    let item = Item { id: MediaId([1; 32]), shape };
    let expansion = expand(&tokenizer.encode(placeholder), &[item], model).map_err(|error| error.to_string())?;
    check_view(case, &expansion.view, tokenizer)
}

fn check_video(case: &Value, model: &VideoModel, tokenizer: &Tokenizer) -> Result<(), String> {
    let (width, height, frames) = (side(case, "w")?, side(case, "h")?, side(case, "frames")?);
    let fps = case["fps"].as_f64().ok_or("no fps")?;
    let shape = match (model.measure(&Video { width, height, frames, fps }), case.get("error")) {
        (Ok(shape), None) => shape,
        (Err(_), Some(_)) => return Ok(()),
        (Ok(shape), Some(_)) => return Err(format!("{} tokens, not refused", shape.tokens())),
        (Err(error), None) => return Err(error.to_string()),
    };
    if case["tokens"] != shape.tokens() {
        return Err(format!("{} tokens, not {}", shape.tokens(), case["tokens"]));
    }
    let (mut view, mut encode) = (RoutingView::default(), |text: &str| Some(tokenizer.encode(text)));
    // The marks that the template writes stay.
    let mark = |text: &str, view: &mut RoutingView| {
        tokenizer.encode(text).into_iter().for_each(|id| view.push(id, 1));
    };
    mark("<|vision_start|>", &mut view);
    if !model.push(&shape, &mut encode, &mut view) {
        return Err("a time cannot be encoded".to_owned());
    }
    mark("<|vision_end|>", &mut view);
    check_view(case, &view, tokenizer)
}

fn check_view(case: &Value, view: &RoutingView, tokenizer: &Tokenizer) -> Result<(), String> {
    let (text, total) = tokenizer.describe(view);
    if case["total"].as_u64().is_some_and(|wanted| wanted != total as u64) {
        return Err(format!("{total} in all, not {}", case["total"]));
    }
    match case["expand"].as_str() {
        Some(wanted) if wanted != text => Err(format!("expands to {text}, not to {wanted}")),
        _ => Ok(()),
    }
}

fn of_vllm(group: &Value) -> bool {
    group["source"].as_str().is_some_and(|source| source.starts_with("vllm"))
}

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use jiff::civil::date;
use serde_json::{Map, Value, json};

use super::{LoadOptions, PromptModel};
use crate::error::{LoadError, RenderError};
use crate::input::{ChatInput, Placeholders};
use crate::template::ContentFormat;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/vllm/tiny-qwen3-vl");

/// A model directory that goes away with the test.
struct Dir(PathBuf);

impl Dir {
    /// The tiny model's tokenizer with other files beside it.
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let path = std::env::temp_dir().join(format!("fovea-prompt-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        std::fs::copy(Path::new(TINY).join("tokenizer.json"), path.join("tokenizer.json")).unwrap();
        files.iter().for_each(|(name, text)| std::fs::write(path.join(name), text).unwrap());
        Self(path)
    }

    fn load(&self, options: LoadOptions) -> PromptModel {
        PromptModel::load_with(&self.0, options).unwrap()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // What stays behind is a leftover in the temporary folder, no failure.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One user message with an image, and no template variables.
static PLAIN_INPUT: LazyLock<(Value, Map<String, Value>)> =
    LazyLock::new(|| (json!([{"role": "user", "content": ["hi ", {"type": "image"}]}]), Map::new()));

/// Renders under changes to an otherwise plain input.
fn render<'a>(model: &PromptModel, change: impl FnOnce(&mut ChatInput<'a>)) -> Result<String, RenderError> {
    let (messages, kwargs) = &*PLAIN_INPUT;
    let mut input = ChatInput {
        messages,
        tools: None,
        documents: None,
        chat_template: None,
        chat_template_kwargs: kwargs,
        reasoning_effort: None,
        add_generation_prompt: true,
        continue_final_message: false,
        placeholders: Placeholders { image: "<image>", ..Placeholders::default() },
        now: date(2026, 11, 30).at(12, 0, 0, 0),
    };
    change(&mut input);
    model.render_chat(&input)
}

const PLAIN: &str =
    "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}";

#[test]
fn a_template_of_text_gets_placeholders_and_special_tokens() {
    let config = json!({"bos_token": {"content": "<s>"}, "chat_template": PLAIN}).to_string();
    let dir = Dir::new("text", &[("tokenizer_config.json", &config)]);
    let model = dir.load(LoadOptions::default());
    assert_eq!(model.content_format(), Some(ContentFormat::String));
    assert_eq!(render(&model, |_| {}).unwrap(), "<s>[<image>\nhi ]>");
}

#[test]
fn the_content_format_can_be_given() {
    let dir = Dir::new("given", &[("chat_template.jinja", "{{ messages[0].content[1].type }}")]);
    let model = dir.load(LoadOptions { content_format: Some(ContentFormat::OpenAi), ..LoadOptions::default() });
    assert_eq!(render(&model, |_| {}).unwrap(), "image");
}

#[test]
fn templates_come_from_the_files_in_the_engines_order() {
    let named = json!([{"name": "default", "template": "own"}, {"name": "tool_use", "template": "tools"}]);
    let own = json!({"chat_template": named}).to_string();
    let processor = json!({"chat_template": "processor"}).to_string();
    let check = |files: &[(&str, &str)], plain: &str, with_tools: &str| {
        let dir = Dir::new("order", files);
        let model = dir.load(LoadOptions::default());
        assert_eq!(render(&model, |_| {}).unwrap(), plain);
        assert_eq!(render(&model, |input| input.tools = Some(&[])).unwrap(), with_tools);
    };
    let (own, processor) = (("tokenizer_config.json", own.as_str()), ("chat_template.json", processor.as_str()));
    check(&[own], "own", "tools");
    check(&[own, processor], "processor", "tools");
    check(&[processor], "processor", "processor");
    check(&[own, processor, ("chat_template.jinja", "file")], "file", "file");
}

#[test]
fn request_variables_reach_the_template_as_the_engine_lets_them() {
    let template =
        "{{ a }},{{ padding }},{{ documents }},{{ reasoning_effort }},{{ enable_thinking }},{{ strftime_now('%Y') }}";
    let dir = Dir::new("kwargs", &[("chat_template.jinja", template)]);
    let model = dir.load(LoadOptions::default());
    let kwargs = |json: Value| json.as_object().unwrap().clone();
    let given = kwargs(json!({"a": 1, "padding": 2, "unused": 3, "documents": [4]}));
    assert_eq!(render(&model, |input| input.chat_template_kwargs = &given).unwrap(), "1,,[4],,,2026");
    let effort = json!("none");
    assert_eq!(render(&model, |input| input.reasoning_effort = Some(&effort)).unwrap(), ",,None,none,False,2026");
    let both = kwargs(json!({"enable_thinking": true}));
    let rendered =
        render(&model, |input| (input.reasoning_effort, input.chat_template_kwargs) = (Some(&effort), &both));
    assert_eq!(rendered.unwrap(), ",,None,none,True,2026");
    let refused = kwargs(json!({"tokenize": true}));
    assert!(matches!(render(&model, |input| input.chat_template_kwargs = &refused), Err(RenderError::Kwarg { .. })));
}

#[test]
fn a_final_message_can_be_continued() {
    let render_with = |template: &str| {
        let dir = Dir::new("continue", &[("chat_template.jinja", template)]);
        let model = dir.load(LoadOptions::default());
        render(&model, |input| (input.continue_final_message, input.add_generation_prompt) = (true, false))
    };
    assert_eq!(render_with("<{{ messages[0].content }}>").unwrap(), "<<image>\nhi ");
    assert_eq!(render_with("<{{ messages[0].content | trim }}>").unwrap(), "<<image>\nhi");
    assert!(matches!(render_with("nothing of it"), Err(RenderError::Refused { .. })));
    let dir = Dir::new("both", &[("chat_template.jinja", PLAIN)]);
    let model = dir.load(LoadOptions::default());
    assert!(matches!(render(&model, |input| input.continue_final_message = true), Err(RenderError::Refused { .. })));
}

#[test]
fn what_cannot_be_rendered_is_an_error_of_its_own() {
    let dir = Dir::new("none", &[]);
    let model = dir.load(LoadOptions::default());
    assert!(matches!(render(&model, |_| {}), Err(RenderError::NoTemplate)));
    assert!(matches!(render(&model, |input| input.chat_template = Some("x")), Err(RenderError::ClientTemplate)));
    let dir = Dir::new("raise", &[("chat_template.jinja", "{{ raise_exception('no images') }}")]);
    let model = dir.load(LoadOptions::default());
    assert!(matches!(render(&model, |_| {}), Err(RenderError::Template { message }) if message == "no images"));
}

#[test]
fn a_directory_that_cannot_be_used_says_why() {
    let missing = PromptModel::load(Path::new("/no/such/model")).err().unwrap();
    assert!(matches!(&missing, LoadError::Read { path, .. } if path.ends_with("tokenizer.json")), "{missing}");
    let load = |files: &[(&str, &str)]| PromptModel::load(&Dir::new("bad", files).0).err().unwrap();
    assert!(matches!(load(&[("tokenizer.json", "{")]), LoadError::Json { .. }));
    assert!(matches!(load(&[("tokenizer.json", "{}")]), LoadError::Tokenizer { .. }));
    assert!(matches!(load(&[("tokenizer_config.json", "nope")]), LoadError::Json { .. }));
    assert!(matches!(load(&[("chat_template.jinja", "{% for %}")]), LoadError::Template { .. }));
}

#[test]
fn a_conversation_of_four_megabytes_fits_the_limits() {
    let model = PromptModel::load(Path::new(TINY)).unwrap();
    let turn = |number: usize| json!({"role": (["user", "assistant"][number % 2]), "content": "word ".repeat(400)});
    let messages: Value = (0..2000).map(turn).collect();
    let (mut input, kwargs) = (None, Map::new());
    render(&model, |plain| input = Some(*plain)).unwrap();
    let input = ChatInput { messages: &messages, chat_template_kwargs: &kwargs, ..input.unwrap() };
    let text = model.render_chat(&input).unwrap();
    assert!(text.len() > 4_000_000);
}

#[test]
fn a_file_that_the_fast_tokenizer_cannot_load_goes_to_the_other() {
    let file = json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}, "padding": null,
        "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hi": 1, "you": 2}, "unk_token": "[UNK]"},
    });
    let dir = Dir::new("fallback", &[("tokenizer.json", &file.to_string())]);
    let model = dir.load(LoadOptions::default());
    let mut ids = vec![9];
    model.encode("hi you there", false, &mut ids).unwrap();
    assert_eq!((model.tokenizer_name(), ids), ("tokenizers", vec![9, 1, 2, 0]));
    assert_eq!((model.token_to_id("you"), model.token_to_id("me")), (Some(2), None));
}

#[test]
fn a_model_is_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<PromptModel>();
}

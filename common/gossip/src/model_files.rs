//! Files of a model that a sidecar gives to balancers, each at [`PATH`] followed by its name.

/// Where a sidecar gives them, to balancers only.
pub const PATH: &str = "/fovea/v1/model/";

/// Largest file, in bytes; tokenizers of large vocabularies have about 35 MB.
pub const FILE_BYTES_MAX: u64 = 64 << 20;

/// The files without which no prompt can be predicted.
pub const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// Files that a model may lack.
pub const OPTIONAL: [&str; 8] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
];

/// The file that a request path names. Only the listed ones are, so that nothing of a peer's path reaches a file system.
pub fn named(path: &str) -> Option<&'static str> {
    let name = path.strip_prefix(PATH)?;
    NEEDED.into_iter().chain(OPTIONAL).find(|listed| *listed == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_names_are_files() {
        for (path, expect) in [
            ("/fovea/v1/model/config.json", Some("config.json")),
            ("/fovea/v1/model/chat_template.jinja", Some("chat_template.jinja")),
            ("/fovea/v1/model/model.safetensors", None),
            ("/fovea/v1/model/../config.json", None),
            ("/fovea/v1/model//config.json", None),
            ("/fovea/v1/model/%63onfig.json", None),
            ("/fovea/v1/model/", None),
            ("/config.json", None),
        ] {
            assert_eq!(named(path), expect, "{path}");
        }
    }
}

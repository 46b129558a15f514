//! Keys and secrets that cannot be used. No text here holds any part of one.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum TenantError {
    #[error("tenant `{tenant}`: cannot read {}", path.display())]
    Read {
        tenant: String,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("tenant `{tenant}`: {}: longer than {most} bytes; give a file of keys", path.display())]
    TooLong { tenant: String, path: PathBuf, most: u64 },
    #[error("tenant `{tenant}`: environment variable {variable} is not set")]
    NotSet { tenant: String, variable: String },
    #[error(
        "tenant `{tenant}`: key {number} of {origin} is not 16 to 512 letters, digits and punctuation; make one with `openssl rand -hex 24`"
    )]
    BadKey { tenant: String, origin: String, number: usize },
    #[error("tenant `{tenant}`: {origin} holds no key; write one a line")]
    NoKey { tenant: String, origin: String },
    #[error("tenants `{first}` and `{second}` have the same key; give each its own")]
    Twice { first: String, second: String },
    #[error("tenants have {keys} keys, more than {most}; give several users one key")]
    TooMany { keys: usize, most: usize },
    #[error(transparent)]
    EngineKey(#[from] fovea_service::config::KeyError),
    #[error("access.engine_key_file holds characters that no header takes: use letters, digits and punctuation")]
    Characters,
    #[error("{field}: cannot read the secret; write 16 bytes or more into it")]
    Secret {
        field: &'static str,
        #[source]
        source: Option<std::io::Error>,
    },
}

//! `fovea-balancer fetch-check`: what becomes of one media URL under a config, without any engine.
//!
//! One JSON object on stdout. Stable: tests and users' scripts read it. Unlike answers to clients it names addresses.

use std::io::Write as _;
use std::path::PathBuf;

use clap::Parser;
use fovea_media::identity;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::config::BalancerConfig;
use crate::config::media::{IdentityPolicy, MediaConfig};
use crate::fetch::{FetchError, Fetched, Fetcher, MediaMetrics};

#[derive(Debug, Parser)]
#[command(about = "Fetch a media URL as the balancer would, and print what came of it")]
pub struct Args {
    /// http or https URL.
    pub url: String,
    /// `balancer.yaml`, for its `media` section; without it every field has its default.
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Model string that the engine was started with; it enters image identities.
    #[arg(long, default_value = "")]
    pub engine_model: String,
}

/// The `media` section of a config file.
///
/// # Errors
/// When the file cannot be used.
pub fn media_config(path: Option<&PathBuf>) -> anyhow::Result<MediaConfig> {
    Ok(match path {
        Some(path) => fovea_service::config::load::<BalancerConfig>(path)?.media,
        None => MediaConfig::default(),
    })
}

/// Runs one task with a fetcher of its own.
///
/// # Errors
/// When the config's certificates cannot be used, or no runtime can be made.
pub fn with_fetcher<T>(config: &MediaConfig, task: impl AsyncFnOnce(&Fetcher) -> T) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let fetcher = Fetcher::new(config, MediaMetrics::register(&mut Registry::default()))?;
    Ok(runtime.block_on(task(&fetcher)))
}

/// Fetches, prints.
///
/// # Errors
/// When the config cannot be used. A refused URL is an answer, not an error.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let config = media_config(args.config.as_ref())?;
    let got = with_fetcher(&config, async |fetcher| match fetcher.policy() {
        IdentityPolicy::Content => fetcher.fetch(&args.url).await,
        IdentityPolicy::Validator | IdentityPolicy::Url => fetcher.look(&args.url).await,
    })?;
    writeln!(std::io::stdout(), "{}", sheet(&got, args, config.identity))?;
    Ok(())
}

fn sheet(got: &Result<Fetched, FetchError>, args: &Args, policy: IdentityPolicy) -> Value {
    let mut sheet = json!({
        "allowed": got.is_ok(), "reason": null, "address": null, "status": null, "width": null, "height": null,
        "identity_policy": policy, "id": null,
    });
    match got {
        Ok(fetched) => {
            sheet["address"] = json!(fetched.address.to_string());
            sheet["status"] = json!(fetched.status);
            if let Ok(header) = &fetched.header {
                let (width, height) = header.upright();
                (sheet["width"], sheet["height"]) = (json!(width), json!(height));
            }
            let id = match (policy, &fetched.header) {
                (IdentityPolicy::Content, Ok(header)) => {
                    Some(identity::vllm_image_id(&fetched.bytes, header.converted, &args.engine_model).to_string())
                }
                _ => fetched.key(policy, &args.url).map(|key| key.to_string()),
            };
            sheet["id"] = json!(id);
            if let Err(error) = &fetched.header {
                sheet["note"] = json!(error.to_string());
            }
        }
        Err(error) => {
            sheet["reason"] = json!(error.reason());
            sheet["address"] = json!(error.address.map(|address| address.to_string()));
            sheet["status"] = json!(error.status);
            sheet["note"] = json!(error.to_string());
        }
    }
    sheet
}

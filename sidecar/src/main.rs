//! `fovea-sidecar run --config FILE` · `fovea-sidecar doctor --engine URL` · `fovea-sidecar decode --engine NAME [--model-dir DIR] < capture`

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use fovea_service::ready::announce;
use fovea_service::shutdown::Shutdown;
use fovea_service::telemetry;
use fovea_sidecar::app::App;
use fovea_sidecar::doctor;

#[derive(Parser)]
#[command(version, about = "Proxy and KV observer beside one inference engine")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve, until SIGTERM or SIGINT.
    Run {
        /// Path of sidecar.yaml.
        #[arg(long)]
        config: PathBuf,
    },
    /// Translate a capture of KV events on stdin into our hashes, a JSON line per request.
    Decode {
        /// Engine family that made the capture: vllm, sglang or trtllm.
        #[arg(long)]
        engine: String,
        /// Folder of the model that ran; only TensorRT-LLM's events need it.
        #[arg(long, default_value = "")]
        model_dir: OsString,
    },
    /// Check an engine, and say what to change in its command line.
    Doctor(doctor::Args),
}

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Run { config } => serve(&config)?,
        Command::Decode { engine, model_dir } => {
            let (input, output) = (std::io::stdin().lock(), std::io::BufWriter::new(std::io::stdout().lock()));
            fovea_sidecar::decode::run(&engine, Path::new(&model_dir), input, output, std::io::stderr().lock())?;
        }
        Command::Doctor(args) => return Ok(ExitCode::from(examine(&args)?)),
    }
    Ok(ExitCode::SUCCESS)
}

#[tokio::main]
async fn examine(args: &doctor::Args) -> anyhow::Result<u8> {
    Ok(doctor::command(args).await?)
}

#[tokio::main]
async fn serve(config: &Path) -> anyhow::Result<()> {
    let config = fovea_sidecar::config::load(config).context("cannot start")?;
    telemetry::init(&config.log)?;
    let app = App::start(config, Shutdown::on_signals()?).await.context("cannot start")?;
    announce(&serde_json::json!({"ready": true, "http": app.http.to_string(), "admin": app.admin.to_string()}))?;
    app.run().await;
    Ok(())
}

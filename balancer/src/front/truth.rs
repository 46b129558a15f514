//! What is served at this moment, and what is promised: readiness, the list of models, requests that nobody could serve.

use std::collections::BTreeSet;
use std::time::Instant;

use fovea_balancer_core::fleet::{Description, Served};
use pingora_core::protocols::http::ServerSession;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use super::refusal::Refusal;
use super::{Context, End, Front, plan, respond};
use crate::config::ReadyWhen;
use crate::models::Models;
use crate::workers::{PoolRef, Workers};

/// In front of a model's name, in the path of its page.
pub const MODEL_PAGES: &str = "/v1/models/";
/// Label of all models that the config does not declare: no client makes a label.
const OTHER: &str = "other";
/// Of declared models without a worker, named in an answer.
const MISSING_MAX: usize = 5;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ModelLabels {
    pub model: String,
}

/// Requests that came for nothing: what a model is wanted for while it has no worker.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    refused: Family<ModelLabels, Counter>,
}

impl Demand {
    /// `registry` = the outermost one: this name has no prefix of a program, so that a scaler finds it wherever it is counted.
    pub fn register(registry: &mut Registry) -> Self {
        let demand = Self::default();
        let help = "Requests refused because no worker serves their model, by declared model";
        registry.register("fovea_demand_refused", help, demand.refused.clone());
        demand
    }

    /// A request for `model` was refused for want of a worker.
    pub fn refused(&self, model: &str, models: &Models) {
        let model = if models.declares(model) { model } else { OTHER };
        self.refused.get_or_create(&ModelLabels { model: model.to_owned() }).inc();
    }
}

impl Front {
    /// Takes requests.
    pub fn ready(&self) -> bool {
        self.not_ready().is_none()
    }

    /// Why no requests are taken, if so.
    pub fn not_ready(&self) -> Option<String> {
        let now = Instant::now();
        if self.stop.is_cancelled() {
            return Some("stopping".to_owned());
        }
        if !self.workers.any_ready(now) {
            return Some("no worker takes requests".to_owned());
        }
        match self.config.ready_when {
            ReadyWhen::Any => None,
            ReadyWhen::AllDeclared => missing(&self.workers, &self.planner.models, now),
        }
    }

    /// `/v1/models/NAME`
    pub(super) async fn model_page(
        &self,
        client: &mut ServerSession,
        name: &str,
        context: &Context,
    ) -> Result<End, Refusal> {
        let name = percent_decoded(name);
        let mut page = None;
        self.workers.each_name(Instant::now(), |live, served, about| {
            if live == name {
                page = Some(entry(live, served, about));
            }
        });
        match page {
            Some(page) => Ok(respond::json(client, page.to_string().into_bytes(), &context.id).await),
            None if self.planner.models.declares(&name) => Err(plan::no_worker(&name, context.turn)),
            None => Err(Refusal::unknown_model(&name)),
        }
    }
}

fn missing(workers: &Workers, models: &Models, now: Instant) -> Option<String> {
    let mut live = BTreeSet::new();
    workers.each_name(now, |name, _, _| {
        live.insert(name.to_owned());
    });
    let missing: Vec<_> = models.declared().filter(|name| !live.contains(*name)).collect();
    let named = missing.iter().take(MISSING_MAX).copied().collect::<Vec<_>>().join(", ");
    (!missing.is_empty()).then(|| format!("{} declared models have no worker: {named}", missing.len()))
}

/// A model in the lists of the API, with the fields of vLLM's answer that its own clients read.
pub fn entry(name: &str, served: Served, about: &Description<PoolRef>) -> Value {
    let engine = &about.pool.facts.engine;
    let (root, parent) = match served {
        Served::Base => (engine.engine_model.as_str(), None),
        Served::Lora => (name, about.served_names.first()),
    };
    json!({
        "id": name, "object": "model", "created": 0, "owned_by": "fovea", "root": root, "parent": parent,
        "max_model_len": Some(engine.max_model_len).filter(|tokens| *tokens > 0),
    })
}

/// Names of models have slashes, which some clients write as `%2F`.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let hex = after.get(..2).filter(|_| *first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => (bytes.push(byte), rest = &after[2..]).0,
            None => (bytes.push(*first), rest = after).0,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded_and_odd_ones_stay() {
        let decoded = ["Qwen/Qwen3-VL", "Qwen%2fQwen3-VL", "a%", "a%2", "a%zz", "%25"].map(percent_decoded);
        assert_eq!(decoded, ["Qwen/Qwen3-VL", "Qwen/Qwen3-VL", "a%", "a%2", "a%zz", "%"]);
    }

    #[test]
    fn only_declared_models_are_labels() {
        let config = fovea_service::config::parse::<crate::config::BalancerConfig>(
            "models: [{name: a}, {name: b, declared: false}]",
            "b",
        );
        let models = Models::load(&config.unwrap()).unwrap();
        let (mut registry, mut page) = (Registry::default(), String::new());
        let demand = Demand::register(&mut registry);
        ["a", "b", "x", "y", "a"].into_iter().for_each(|model| demand.refused(model, &models));
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        for line in [r#"fovea_demand_refused_total{model="a"} 2"#, r#"fovea_demand_refused_total{model="other"} 3"#] {
            assert!(page.contains(line), "{line} not in:\n{page}");
        }
    }
}

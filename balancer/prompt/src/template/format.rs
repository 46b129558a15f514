//! Whether a template takes message content as a list of parts or as one text: vLLM's `--chat-template-content-format auto`.
//!
//! The answer is in the template's structure: `openai` exactly when some `for` runs over the content of a message. Mirrors
//! `_detect_content_format` of `renderers/hf.py` (0.33), which follows names and not scopes.

mod collect;

use std::collections::HashSet;

use minijinja::machinery::ast::{CallArg, Expr};
use minijinja::machinery::parse;
use minijinja::syntax::SyntaxConfig;

use collect::Parts;

/// How message content reaches a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContentFormat {
    /// One text, media placeholders in front.
    String,
    /// A list of parts.
    OpenAi,
}

impl ContentFormat {
    pub(super) fn detect(source: &str, syntax: &SyntaxConfig) -> Self {
        let Ok(root) = parse(source, "<template>", syntax.clone()) else { return Self::String };
        let parts = Parts::of(&root);
        let content: HashSet<String> = message_variables(&parts).iter().map(|name| format!("{name}.content")).collect();
        let bound = bound_parameters(&parts, &content);
        let over_content = parts.loops.iter().any(|(inside, each)| {
            let Some(iterated) = path(unwrapped(&each.iter)) else { return false };
            match inside {
                Some(index) => content.contains(&iterated) || bound.contains(&(*index, iterated)),
                // Only the bare name, without filters.
                None => content.contains(&iterated) || path(&each.iter).is_some_and(|name| name == "content"),
            }
        });
        if over_content { Self::OpenAi } else { Self::String }
    }
}

/// Everything that names the messages: the variable, its copies, and namespace attributes.
fn aliases(parts: &Parts<'_, '_>) -> HashSet<String> {
    let mut bindings: Vec<(String, String)> = Vec::new();
    for set in &parts.sets {
        let Some(target) = path(&set.target) else { continue };
        if let Some(source) = path(unwrapped(&set.expr)) {
            bindings.push((target, source));
        } else if let Expr::Call(call) = &set.expr
            && matches!(&call.expr, Expr::Var(function) if function.id == "namespace")
        {
            bindings.extend(call.args.iter().filter_map(|argument| match argument {
                CallArg::Kwarg(name, value) => Some((format!("{target}.{name}"), path(unwrapped(value))?)),
                _ => None,
            }));
        }
    }
    let mut names = HashSet::from(["messages".to_owned()]);
    loop {
        let new: Vec<String> = bindings
            .iter()
            .filter(|(target, source)| names.contains(source) && !names.contains(target))
            .map(|(target, _)| target.clone())
            .collect();
        if new.is_empty() {
            return names;
        }
        names.extend(new);
    }
}

/// Loop variables that run over the messages.
fn message_variables(parts: &Parts<'_, '_>) -> HashSet<String> {
    let aliases = aliases(parts);
    let over_messages =
        parts.loops.iter().filter(|(_, each)| path(unwrapped(&each.iter)).is_some_and(|name| aliases.contains(&name)));
    over_messages.filter_map(|(_, each)| path(&each.target)).collect()
}

/// Macro parameters that some call binds to a message's content: (index of the macro, parameter).
fn bound_parameters(parts: &Parts<'_, '_>, content: &HashSet<String>) -> HashSet<(usize, String)> {
    let mut bound = HashSet::new();
    for call in &parts.calls {
        let Some(name) = path(&call.expr) else { continue };
        let called = parts.macros.iter().enumerate().filter(|(_, candidate)| candidate.name == name);
        for (index, called) in called {
            for (position, argument) in call.args.iter().enumerate() {
                let (parameter, value) = match argument {
                    CallArg::Pos(value) => (called.args.get(position).and_then(path), value),
                    CallArg::Kwarg(name, value) => (Some((*name).to_owned()), value),
                    CallArg::PosSplat(_) | CallArg::KwargSplat(_) => continue,
                };
                if let Some(parameter) = parameter
                    && path(unwrapped(value)).is_some_and(|name| content.contains(&name))
                {
                    bound.insert((index, parameter));
                }
            }
        }
    }
    bound
}

/// `a`, `a.b` or `a['b']` as a dotted name.
fn path(expr: &Expr<'_>) -> Option<String> {
    let (base, attribute) = match expr {
        Expr::Var(name) => return Some(name.id.to_owned()),
        Expr::GetAttr(access) => (&access.expr, access.name.to_owned()),
        Expr::GetItem(access) => (&access.expr, constant(&access.subscript_expr)?),
        _ => return None,
    };
    let Expr::Var(base) = base else { return None };
    Some(format!("{}.{attribute}", base.id))
}

fn constant(expr: &Expr<'_>) -> Option<String> {
    match expr {
        Expr::Const(value) => value.value.as_str().map(str::to_owned),
        _ => None,
    }
}

/// Without filters, tests and slices around it.
fn unwrapped<'e, 's>(mut expr: &'e Expr<'s>) -> &'e Expr<'s> {
    loop {
        expr = match expr {
            Expr::Filter(filter) => match &filter.expr {
                Some(inner) => inner,
                None => return expr,
            },
            Expr::Test(test) => &test.expr,
            Expr::Slice(slice) => &slice.expr,
            _ => return expr,
        };
    }
}

#[cfg(test)]
mod tests;

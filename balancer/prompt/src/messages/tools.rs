//! Tool calls of earlier turns, and the tools a request offers.

use serde_json::{Map, Value};

use crate::error::RenderError;

/// Tool calls with arguments as objects, which templates expect; `None` for an empty list.
pub(super) fn normalise_calls(calls: &Value) -> Result<Option<Value>, RenderError> {
    let refused = |problem| RenderError::Refused { field: "messages.tool_calls", problem };
    let calls = calls.as_array().ok_or_else(|| refused("not an array"))?;
    let mut out = Vec::with_capacity(calls.len());
    for call in calls {
        let mut call = call.as_object().ok_or_else(|| refused("an entry is not an object"))?.clone();
        if call.get("type").is_some_and(|kind| kind != "function") {
            return Err(refused("an entry is not of type function"));
        }
        let function = call.get_mut("function").and_then(Value::as_object_mut);
        let function = function.ok_or_else(|| refused("an entry has no function object"))?;
        let arguments = arguments(function.remove("arguments"));
        function.insert("arguments".to_owned(), Value::Object(arguments));
        out.push(Value::Object(call));
    }
    Ok((!out.is_empty()).then_some(Value::Array(out)))
}

/// Whatever is not an object, or the text of one, counts as no arguments.
fn arguments(given: Option<Value>) -> Map<String, Value> {
    match given {
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => serde_json::from_str(&text).unwrap_or_default(),
        _ => Map::new(),
    }
}

/// Tools as vLLM's request model writes them out again: known fields first, absent ones as null, unknown ones after.
pub(crate) fn normalise_tools(tools: &[Value]) -> Result<Value, RenderError> {
    let refused = |problem| RenderError::Refused { field: "tools", problem };
    let mut out = Vec::with_capacity(tools.len());
    for tool in tools {
        let mut tool = tool.as_object().ok_or_else(|| refused("a tool is not an object"))?.clone();
        let kind = tool.shift_remove("type").unwrap_or_else(|| "function".into());
        if kind != "function" {
            return Err(refused("a tool is not of type function"));
        }
        let Some(Value::Object(mut function)) = tool.shift_remove("function") else {
            return Err(refused("a tool has no function object"));
        };
        let fields = ["name", "description", "parameters"];
        let known = fields.map(|field| (field.to_owned(), function.shift_remove(field).unwrap_or_default()));
        let function: Map<String, Value> = known.into_iter().chain(function).collect();
        let head = [("type".to_owned(), kind), ("function".to_owned(), Value::Object(function))];
        out.push(Value::Object(head.into_iter().chain(tool).collect()));
    }
    Ok(Value::Array(out))
}

//! What transformers' Jinja2 environment has and minijinja lacks, or does otherwise. Each difference in a file of its own.

mod float;
pub(crate) mod generation;
mod kinds;
mod raise;
pub(crate) mod strftime;
mod tojson;

use minijinja::Environment;

/// Adds everything that does not depend on the request.
pub(crate) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(float::format);
    environment.add_filter("tojson", tojson::filter);
    environment.add_function("raise_exception", raise::raise_exception);
    environment.add_test("iterable", kinds::is_iterable);
    environment.add_test("sequence", kinds::is_sequence);
}

#[cfg(test)]
mod tests;

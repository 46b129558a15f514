//! A file has at most 500 lines, a function at most 70.

mod common;

use common::{files, read, root, shown};
use syn::spanned::Spanned;
use syn::visit::Visit;

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

struct Functions {
    long: Vec<(String, usize)>,
}

impl Functions {
    fn measure(&mut self, name: &syn::Ident, block: &syn::Block) {
        let span = block.span();
        let lines = span.end().line - span.start().line + 1;
        if lines > FUNCTION_LINES_MAX {
            self.long.push((name.to_string(), lines));
        }
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.measure(&item.sig.ident, &item.block);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.measure(&item.sig.ident, &item.block);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.measure(&item.sig.ident, block);
        }
        syn::visit::visit_trait_item_fn(self, item);
    }
}

#[test]
fn no_file_is_longer_than_500_lines() {
    for path in files(&root(), "rs") {
        let lines = read(&path).lines().count();
        assert!(lines <= FILE_LINES_MAX, "{} has {lines} lines: split it by responsibility", shown(&path));
    }
}

#[test]
fn no_function_is_longer_than_70_lines() {
    for path in files(&root(), "rs") {
        let file = syn::parse_file(&read(&path)).unwrap_or_else(|error| panic!("{}: {error}", shown(&path)));
        let mut functions = Functions { long: Vec::new() };
        functions.visit_file(&file);
        assert!(functions.long.is_empty(), "{}: too long: {:?}", shown(&path), functions.long);
    }
}

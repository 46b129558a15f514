//! The loops, assignments, macros and calls of a template, wherever they stand.

use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Set, Stmt};

/// Parts of a parsed template, in order.
#[derive(Default)]
pub(super) struct Parts<'t, 's> {
    pub sets: Vec<&'t Set<'s>>,
    /// With the index of the macro that the loop stands in.
    pub loops: Vec<(Option<usize>, &'t ForLoop<'s>)>,
    pub macros: Vec<&'t Macro<'s>>,
    pub calls: Vec<&'t Call<'s>>,
    inside: Option<usize>,
}

impl<'t, 's> Parts<'t, 's> {
    pub fn of(root: &'t Stmt<'s>) -> Self {
        let mut parts = Self::default();
        parts.statement(root);
        parts
    }

    fn statements(&mut self, statements: &'t [Stmt<'s>]) {
        statements.iter().for_each(|statement| self.statement(statement));
    }

    fn statement(&mut self, statement: &'t Stmt<'s>) {
        match statement {
            Stmt::Template(root) => self.statements(&root.children),
            Stmt::EmitExpr(emit) => self.expression(&emit.expr),
            Stmt::ForLoop(each) => {
                self.loops.push((self.inside, each));
                self.expression(&each.iter);
                self.maybe(each.filter_expr.as_ref());
                self.statements(&each.body);
                self.statements(&each.else_body);
            }
            Stmt::IfCond(condition) => {
                self.expression(&condition.expr);
                self.statements(&condition.true_body);
                self.statements(&condition.false_body);
            }
            Stmt::WithBlock(with) => {
                with.assignments.iter().for_each(|(_, value)| self.expression(value));
                self.statements(&with.body);
            }
            Stmt::Set(set) => {
                self.sets.push(set);
                self.expression(&set.expr);
            }
            Stmt::SetBlock(set) => {
                self.maybe(set.filter.as_ref());
                self.statements(&set.body);
            }
            Stmt::AutoEscape(block) => self.statements(&block.body),
            Stmt::FilterBlock(block) => {
                self.expression(&block.filter);
                self.statements(&block.body);
            }
            Stmt::Block(block) => self.statements(&block.body),
            Stmt::Macro(declared) => self.declared(declared),
            Stmt::CallBlock(block) => {
                self.call(&block.call);
                self.declared(&block.macro_decl);
            }
            Stmt::Do(statement) => self.call(&statement.call),
            Stmt::EmitRaw(_) | Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {}
            Stmt::Continue(_) | Stmt::Break(_) => {}
        }
    }

    fn declared(&mut self, declared: &'t Macro<'s>) {
        let outside = self.inside.replace(self.macros.len());
        self.macros.push(declared);
        declared.defaults.iter().for_each(|value| self.expression(value));
        self.statements(&declared.body);
        self.inside = outside;
    }

    fn call(&mut self, call: &'t Call<'s>) {
        self.calls.push(call);
        self.expression(&call.expr);
        self.arguments(&call.args);
    }

    fn arguments(&mut self, arguments: &'t [CallArg<'s>]) {
        for argument in arguments {
            let (CallArg::Pos(value)
            | CallArg::Kwarg(_, value)
            | CallArg::PosSplat(value)
            | CallArg::KwargSplat(value)) = argument;
            self.expression(value);
        }
    }

    fn maybe(&mut self, expr: Option<&'t Expr<'s>>) {
        if let Some(expr) = expr {
            self.expression(expr);
        }
    }

    fn expression(&mut self, expr: &'t Expr<'s>) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(slice) => {
                self.expression(&slice.expr);
                [&slice.start, &slice.stop, &slice.step].into_iter().for_each(|bound| self.maybe(bound.as_ref()));
            }
            Expr::UnaryOp(op) => self.expression(&op.expr),
            Expr::BinOp(op) => {
                self.expression(&op.left);
                self.expression(&op.right);
            }
            Expr::Compare(chain) => {
                self.expression(&chain.expr);
                chain.ops.iter().for_each(|op| self.expression(&op.expr));
            }
            Expr::IfExpr(choice) => {
                self.expression(&choice.test_expr);
                self.expression(&choice.true_expr);
                self.maybe(choice.false_expr.as_ref());
            }
            Expr::Filter(filter) => {
                self.maybe(filter.expr.as_ref());
                self.arguments(&filter.args);
            }
            Expr::Test(test) => {
                self.expression(&test.expr);
                self.arguments(&test.args);
            }
            Expr::GetAttr(access) => self.expression(&access.expr),
            Expr::GetItem(access) => {
                self.expression(&access.expr);
                self.expression(&access.subscript_expr);
            }
            Expr::Call(call) => self.call(call),
            Expr::List(list) => list.items.iter().for_each(|item| self.expression(item)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.expression(item)),
            Expr::Map(map) => map.keys.iter().chain(&map.values).for_each(|item| self.expression(item)),
        }
    }
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/util/version"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/cel/environment"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// expression is a CEL expression of a manifest.
type expression struct {
	name, text string
	types      []*cel.Type // that it may have; none means any
}

func (e expression) GetName() string       { return e.name }
func (e expression) GetExpression() string { return e.text }
func (e expression) ReturnTypes() []*cel.Type {
	if len(e.types) == 0 {
		return []*cel.Type{cel.AnyType, cel.DynType}
	}
	return e.types
}

// documents returns the objects of a kind in the manifests below deploy/.
func documents[T any](t *testing.T, kind string) (found []T) {
	t.Helper()
	must.Succeed(t, filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		must.Succeed(t, err)
		for document := range bytes.SplitSeq(text, []byte("\n---\n")) {
			if !strings.Contains("\n"+string(document), "\nkind: "+kind+"\n") {
				continue
			}
			var object T
			must.Succeed(t, yaml.UnmarshalStrict(document, &object))
			found = append(found, object)
		}
		return nil
	}))
	return found
}

// TestExpressionsOfOldestKubernetes compiles all expressions of admission as the API server of
// Kubernetes 1.34 does when they are written. It has the functions of 1.33 only, so that the API
// server before it could read them after a rollback
// (MinCompatibilityVersion of k8s.io/component-base/compatibility). An API server that emulates
// 1.34 takes more.
func TestExpressionsOfOldestKubernetes(t *testing.T) {
	oldest := environment.MustBaseEnvSet(version.MajorMinor(1, 33))
	policies := documents[admissionregistrationv1.ValidatingAdmissionPolicy](t,
		"ValidatingAdmissionPolicy")
	for _, policy := range policies {
		t.Run("policy "+policy.Name, func(t *testing.T) {
			compile(t, oldest, policy.Spec.MatchConditions, policy.Spec.Variables,
				policy.Spec.Validations)
			if len(policy.Spec.AuditAnnotations) > 0 || policy.Spec.ParamKind != nil {
				t.Error("has auditAnnotations or paramKind, which are not compiled here")
			}
		})
	}

	webhooks := documents[admissionregistrationv1.ValidatingWebhookConfiguration](t,
		"ValidatingWebhookConfiguration")
	for _, configuration := range webhooks {
		for _, webhook := range configuration.Webhooks {
			t.Run("webhook "+webhook.Name, func(t *testing.T) {
				compile(t, oldest, webhook.MatchConditions, nil, nil)
			})
		}
	}

	if len(policies) == 0 || len(webhooks) == 0 {
		t.Errorf("found %d policies and %d webhooks", len(policies), len(webhooks))
	}
}

func compile(
	t *testing.T, oldest *environment.EnvSet, conditions []admissionregistrationv1.MatchCondition,
	variables []admissionregistrationv1.Variable, validations []admissionregistrationv1.Validation,
) {
	t.Helper()
	compiler, err := plugincel.NewCompositedCompiler(oldest)
	must.Succeed(t, err)
	withAuthorizer := plugincel.OptionalVariableDeclarations{HasAuthorizer: true}
	check := func(e expression) {
		t.Helper()
		result := compiler.CompileCELExpression(e, withAuthorizer, environment.NewExpressions)
		if result.Error != nil {
			t.Errorf("%s: %v", e.name, result.Error)
		}
	}

	for _, c := range conditions {
		check(expression{c.Name, c.Expression, []*cel.Type{cel.BoolType}})
	}

	for _, v := range variables {
		result := compiler.CompileAndStoreVariable(expression{name: v.Name, text: v.Expression},
			withAuthorizer, environment.NewExpressions)
		if result.Error != nil {
			t.Errorf("variable %s: %v", v.Name, result.Error)
		}
	}
	for _, v := range validations {
		check(expression{"validation " + v.Message, v.Expression, []*cel.Type{cel.BoolType}})
		if v.MessageExpression != "" {
			check(expression{"messageExpression", v.MessageExpression, []*cel.Type{cel.StringType}})
		}
	}
}

// Command gitops answers as Argo CD and Flux do: with the Lua interpreter of the one, and with the other's own reading
// of health. It reads one JSON question a line and writes one JSON answer a line.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/fluxcd/pkg/apis/kustomize"
	"github.com/fluxcd/pkg/runtime/cel"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	luajson "layeh.com/gopher-json"
)

// A question has an object and at most one of the others; with neither, it asks for the object's kstatus.
type question struct {
	Object map[string]any                    `json:"object"`
	Lua    string                            `json:"lua"`
	Checks *kustomize.HealthCheckExpressions `json:"checks"`
}

type answer struct {
	Value json.RawMessage `json:"value,omitempty"`
	Error string          `json:"error,omitempty"`
}

func main() {
	questions := bufio.NewScanner(os.Stdin)
	questions.Buffer(nil, 16<<20)
	answers := json.NewEncoder(os.Stdout)
	for questions.Scan() {
		value, err := ask(questions.Bytes())
		said := answer{Value: value}
		if err != nil {
			said = answer{Error: err.Error()}
		}
		if err := answers.Encode(said); err != nil {
			panic(err)
		}
	}
}

func ask(line []byte) (json.RawMessage, error) {
	// Integers as the tools read them from the API server, not as floating point.
	var asked question
	var object unstructured.Unstructured
	if err := json.Unmarshal(line, &asked); err != nil {
		return nil, err
	}
	text, err := json.Marshal(asked.Object)
	if err != nil {
		return nil, err
	}
	if err := object.UnmarshalJSON(text); err != nil {
		return nil, err
	}
	switch {
	case asked.Lua != "":
		return run(asked.Lua, object.Object)
	case asked.Checks != nil:
		return flux(asked.Checks, &object)
	default:
		found, err := status.Compute(&object)
		if err != nil {
			return nil, err
		}
		return json.Marshal(found.Status)
	}
}

func flux(checks *kustomize.HealthCheckExpressions, object *unstructured.Unstructured) (json.RawMessage, error) {
	evaluator, err := cel.NewStatusEvaluator(checks)
	if err != nil {
		return nil, err
	}
	found, err := evaluator.Evaluate(context.Background(), object)
	if err != nil {
		return nil, err
	}
	return json.Marshal(found.Status)
}

// run has the libraries that a script of a user gets in production, less the one for the time. Argo CD's own tests of
// health scripts open all of them, so a script that needs `string` would pass there and fail here.
func run(script string, object map[string]any) (json.RawMessage, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	libraries := map[string]lua.LGFunction{
		lua.LoadLibName: lua.OpenPackage,
		lua.BaseLibName: lua.OpenBase,
		lua.TabLibName:  lua.OpenTable,
	}
	for _, name := range []string{lua.LoadLibName, lua.BaseLibName, lua.TabLibName} {
		opened := lua.P{Fn: state.NewFunction(libraries[name]), Protect: true}
		if err := state.CallByParam(opened, lua.LString(name)); err != nil {
			return nil, err
		}
	}
	limited, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	state.SetContext(limited)
	state.SetGlobal("obj", table(state, object))
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	result := state.Get(-1)
	if result.Type() != lua.LTTable {
		return nil, fmt.Errorf("the script returns %s, not a table", result.Type())
	}
	return luajson.Encode(result)
}

func table(state *lua.LState, value any) lua.LValue {
	switch typed := value.(type) {
	case map[string]any:
		made := state.CreateTable(0, len(typed))
		for key, item := range typed {
			made.RawSetString(key, table(state, item))
		}
		return made
	case []any:
		made := state.CreateTable(len(typed), 0)
		for _, item := range typed {
			made.Append(table(state, item))
		}
		return made
	case string:
		return lua.LString(typed)
	case bool:
		return lua.LBool(typed)
	case int64:
		return lua.LNumber(typed)
	case float64:
		return lua.LNumber(typed)
	default:
		return lua.LNil
	}
}
